"""Each row of a layer launches as many kernels as its account says: on this host, counted by
PyTorch's dispatcher."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptdmpi.model.operators import run
from ptdmpi.plan.layer.attention import Attend, SplitHeads
from ptdmpi.plan.layer.elementwise import AddResidual, Normalize
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from tests._layers import random_tensor, tensor_axis
from tests._rows import SHAPES
from tests.model.layer.test_rows import B, H, S, layer_of, replace_last, row_is_capped

LEAST_LAUNCHED = 6 * H  # elements; gradients of a bias and a norm's statistics have fewer
# Allocations, a view that PyTorch does not call one, and the copy of a leaf's gradient into the
# leaf's strides: a layer's activations are no leaves.
NOT_LAUNCHED = ("empty", "empty_like", "ones_like", "new_empty_strided", "_unsafe_view", "copy_")
SEVERAL_KERNELS = {"native_layer_norm_backward": 2}  # the input's gradient, and the weights'
# What this host composes of so many kernels, without the sum with the residual's gradient.
COMPOSED = {
    "rmsnorm": 4,
    "rmsnorm_backward": 9,
    "swiglu": 2,
    "swiglu_backward": 4,
    "geglu": 2,
    "geglu_backward": 4,
}
# Its kernels of dropout, forward and backward: 14 that draw the mask, two products; two products.
DROPS = (16, 2)


class Launches(TorchDispatchMode):
    """The number of kernels that the dispatcher launches on large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        most = max((x.numel() for x in args if isinstance(x, Tensor)), default=0)
        launches = not func.is_view and name not in NOT_LAUNCHED
        if launches and (most >= LEAST_LAUNCHED or name == "cat"):  # `cat` has a list of tensors
            self.count += SEVERAL_KERNELS.get(name, 1)
        return func(*args, **(kwargs or {}))


def foreseen_launches(row, sizes: Sizes) -> tuple[int, int]:
    """Return the launches of a row on this host, forward and backward, of large tensors."""
    passes = (row.forward(sizes), [*row.backward(sizes), *row.weights(sizes)])
    counts = [
        sum(COMPOSED.get(getattr(k, "kind", ""), k.launches) for k in kernels) for kernels in passes
    ]
    if isinstance(row, Attend):  # this host's attention yields joined heads, which others copy
        counts = [count - 1 for count in counts]
    if isinstance(row, Normalize) and sizes.model.norm not in COMPOSED:
        counts[1] -= 1  # the sum with the residual's gradient is outside of the row
    if isinstance(row, AddResidual) and sizes.drops:
        counts = [count + more for count, more in zip(counts, DROPS, strict=True)]
    return tuple(counts)


def wrong_launches(name: str) -> list[str]:
    """Return the rows that launch another number of kernels than their account says."""
    from mpi4py import MPI

    placed, sizes, context = layer_of(name, tensor_axis(MPI.COMM_SELF, False), "fp32")
    values = {"x": random_tensor("x", (S, B, H), "fp32")}
    mistakes = []
    for step in placed.layer.steps:
        row = step.row
        inputs = {name: values[name].detach().clone().requires_grad_() for name in row.inputs}
        with Launches() as forward:
            outputs = run([replace_last(step)], dict(inputs), context)
        made = [outputs[name] for name in row.outputs]
        with Launches() as backward:
            torch.autograd.backward(made, [torch.ones_like(value) for value in made])
        values.update({name: outputs[name].detach() for name in row.outputs})
        if isinstance(row, Attend) and row_is_capped(sizes):
            continue
        found, foreseen = (forward.count, backward.count), foreseen_launches(row, sizes)
        if isinstance(row, MixExperts):  # experts have few tokens here, and scores are small
            foreseen = pytest.approx(foreseen, rel=0.2)
        if found != foreseen:
            mistakes.append(f"{row.name}: launches {found}, not {foreseen}")
    return mistakes


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_launches_what_it_says(name):
    assert wrong_launches(name) == []


@pytest.mark.parametrize(
    ("kind", "method"),
    [(SplitHeads, "_rotated"), (SplitHeads, "_normalised"), (Multiply, "weights")],
)
def test_a_kernel_that_is_not_in_the_account_is_found(kind, method):
    with mock.patch.object(kind, method, lambda self, *given, **named: iter(())):
        assert wrong_launches("qwen3") != []
