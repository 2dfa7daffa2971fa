"""Where keys and values are in memory when PyTorch's kernel reads them for block after block."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.model.kernels.choice import AttentionByLibrary, HostChoice

HEADS, SIZE = 2, 8


class KeyStrides(TorchDispatchMode):
    """The elements between two positions of the keys and values that attention kernels get."""

    def __init__(self) -> None:
        super().__init__()
        self.of_kernels: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            # the operands are (q, k, v) in the forward, (gradient, q, k, v) in the backward
            k, v = args[2:4] if name.endswith("_backward") else args[1:3]
            self.of_kernels.setdefault(name, set()).update((k.stride(2), v.stride(2)))
        return func(*args, **(kwargs or {}))


def test_attention_in_blocks_reads_keys_and_values_of_a_head_one_after_the_other():
    # cut out of one tensor [s, b, heads], as a layer does
    fused = torch.randn(256, 1, 3 * HEADS, SIZE).requires_grad_()
    q, k, v = (part.permute(1, 2, 0, 3) for part in fused.chunk(3, dim=2))
    core = AttentionCore(Scores(SIZE**-0.5), Kernels(HostChoice(AttentionByLibrary())))
    with KeyStrides() as strides:
        core(q, k, v).sum().backward()
    assert len(strides.of_kernels) == 2
    assert set.union(*strides.of_kernels.values()) == {SIZE}
