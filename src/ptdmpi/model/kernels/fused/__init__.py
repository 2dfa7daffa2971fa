"""Kernels in Triton. Each computes several operations in one pass over memory.

The file of a kind (`KINDS`) has its equation, its kernels, and the functions that launch them. The
plain PyTorch code of the same kind is the reference for the tests, and computes everything if
Triton is not chosen. The file imports Triton, so it is imported only when its kernels run: Triton
compiles them at their first call on a device. On a CPU, Triton's interpreter can run them (with
TRITON_INTERPRET=1 in the environment); only tests do this.

A kernel reads and writes tensors in their own type. It computes in float32, or in float64 for
float64 tensors, and rounds each result once.
"""

# the kinds of kernels, which are the names of the files, in the table presets/kernels.toml
KINDS = ("loss", "norm", "gated")
