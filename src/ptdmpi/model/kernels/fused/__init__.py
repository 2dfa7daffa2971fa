"""Kernels in Triton, each of which computes several operations in one pass over memory.

For each kind of kernel (`KINDS`), one file has the equation, the kernels, and the functions that
launch them. The plain PyTorch code of the same kind is the reference for the tests, and is used if
Triton is not chosen. The file imports Triton, so it is imported only when its kernels run. Triton
compiles them at their first call on a device. Triton's interpreter can run them on a CPU (with
TRITON_INTERPRET=1 in the environment); only tests do this.

A kernel reads and writes tensors in their own type. It computes in float32, or in float64 for
float64 tensors, and rounds each result once.
"""

from typing import get_args

from ptdmpi.plan.machine.cluster import TritonKind

KINDS: tuple[str, ...] = get_args(TritonKind)
