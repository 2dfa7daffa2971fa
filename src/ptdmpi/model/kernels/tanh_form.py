"""The constants of GELU's tanh form: gelu(x) = x S(z), where S is the logistic function and z =
`SLOPE` (x + `CUBE` x^3)."""

import math

CUBE = 0.044715  # Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
