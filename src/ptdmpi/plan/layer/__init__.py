"""A layer as a list of operators. The model is built from this list, and the planner computes costs
from the same list."""
