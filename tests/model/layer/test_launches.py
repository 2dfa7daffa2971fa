"""Each row of a layer launches as many kernels as its account says: on this host, counted by
PyTorch's dispatcher.

The rows list the kernels of a device that multiplies half types. The tables below say what a host
composes of more kernels. What a collective computes is its message, not a launch of its row.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ptdmpi.comm.communicator import Communicator
from ptdmpi.model.kernels import choice, host
from ptdmpi.model.kernels.choice import BY_LIBRARY
from ptdmpi.model.operators import run
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import FusedAttention, Kernel, MatrixProduct, MemoryPass
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.attention.heads import SplitHeads
from ptdmpi.plan.layer.elementwise import AddResidual, Normalize
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.folds import operators, recomputed
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from tests._layers import positions, random_tensor, tensor_axis
from tests._rows import SHAPES, has_many_scales, require_legal
from tests.model.layer.test_rows import B, H, S, layer_of, replace_last, row_is_capped
from tests.parallel import parallel

# Elements on all tensor ranks; gradients of a bias and a norm's statistics have fewer.
LEAST_LAUNCHED = 6 * H
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
# In half types, its norm also copies input and output to other types, and back the gradient.
HALF_COPIES = {"rmsnorm": 2, "rmsnorm_backward": 1}
# Widened products copy two operands and the result. The gradient of a weight is added to the sum by
# the product's own kernel. Attention copies q, k, v and the output, or their gradients.
WIDENED_COPIES = {MatrixProduct: 3, FusedAttention: 4}
# Name -> (precision, True if half types are widened); fp16 is computed as bf16 is.
RECIPES = {
    "fp32": ("fp32", False),
    "fp64": ("fp64", False),
    "bf16": ("bf16", False),
    "bf16 widened": ("bf16", True),
    "fp8": ("fp8", False),
    "fp8 widened": ("fp8", True),
    "fp8 delayed": ("fp8 delayed", False),
    "fp8 delayed widened": ("fp8 delayed", True),
}


class Launches(TorchDispatchMode):
    """The number of kernels that the dispatcher launches on tensors of at least `least`
    elements."""

    def __init__(self, least: int = LEAST_LAUNCHED) -> None:
        super().__init__()
        self.least = least
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        most = max((x.numel() for x in args if isinstance(x, Tensor)), default=0)
        launches = not func.is_view and name not in NOT_LAUNCHED
        if launches and (most >= self.least or name == "cat"):  # `cat` has a list of tensors
            self.count += SEVERAL_KERNELS.get(name, 1)
        return func(*args, **(kwargs or {}))


def uncounted(comm: Communicator) -> None:
    """Make all methods of a communicator compute without dispatch modes."""

    def without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            with _disable_current_modes():
                return method(*args, **named)

        return call

    for name, method in inspect.getmembers(comm, inspect.ismethod):
        if not name.startswith("_"):
            setattr(comm, name, without_modes(method))


@contextmanager
def this_trainer() -> Iterator[None]:
    """Compute by PyTorch's kernels, on a host that multiplies half types unless they are
    widened."""
    with (
        mock.patch.object(host, "multiplies", lambda device_type, dtype: True),
        mock.patch.object(choice, "usual_choice", lambda device_type, dtype: BY_LIBRARY),
    ):
        yield


def launches(kernels: Iterable[Kernel], sizes: Sizes) -> int:
    """Return the launches of kernels on this host."""
    count = 0
    for kernel in kernels:
        kind = getattr(kernel, "kind", "")
        count += COMPOSED.get(kind, kernel.launches)
        if sizes.compute_bytes < sizes.wide_bytes:
            count += HALF_COPIES.get(kind, 0)
        if sizes.software.wide_products:
            count += WIDENED_COPIES.get(type(kernel), 0) * kernel.launches
    return count


def gradient_launches(row, sizes: Sizes) -> int:
    """Return the launches of the gradients of a row's weights on this host."""
    kernels = list(row.weights(sizes))
    if sizes.software.wide_products:
        products = [kernel for kernel in kernels if not isinstance(kernel, MemoryPass)]
        rounds = [kernel for kernel in kernels if isinstance(kernel, MemoryPass)]
        if getattr(row, "scaling", "none") != "none":  # all but the pass that adds are roundings
            products += [kernel for kernel in rounds if kernel.launches > 1]
        added = sum(isinstance(kernel, MatrixProduct) * kernel.launches for kernel in products)
        return launches(products, sizes) - added
    return launches(kernels, sizes)


def foreseen_launches(row, sizes: Sizes, recompute: str = "none") -> tuple[int, int]:
    """Return the launches of a row on this host, forward and backward, of large tensors."""
    counts = [
        launches(row.forward(sizes), sizes),
        launches(row.backward(sizes), sizes) + gradient_launches(row, sizes),
    ]
    if isinstance(row, Attend):  # this host's attention yields joined heads, which others copy
        counts = [count - 1 for count in counts]
        if recompute == "selective":
            counts[1] += launches(row.recomputed(sizes), sizes)
            counts[1] -= sizes.software.wide_products  # it stops before its output is rounded
    if isinstance(row, Normalize) and sizes.model.norm not in COMPOSED:
        counts[1] -= 1  # the sum with the residual's gradient is outside of the row
    if isinstance(row, AddResidual) and sizes.drops:
        counts = [count + more for count, more in zip(counts, DROPS, strict=True)]
    return tuple(counts)


def wrong_launches(name: str, axis, recipe: str = "fp32", recompute: str = "none") -> list[str]:
    """Return the rows that launch another number of kernels than their account says."""
    precision, widens = RECIPES[recipe]
    placed, sizes, context = layer_of(name, axis, precision, recompute, widens=widens)
    uncounted(axis.comm)
    least = LEAST_LAUNCHED // axis.size
    values = {"x": positions(random_tensor("x", (S, B, H), precision), axis)}
    mistakes = []
    for step in placed.layer.steps:
        row = step.row
        inputs = {name: values[name].detach().clone().requires_grad_() for name in row.inputs}
        with Launches(least) as forward:
            outputs = run([replace_last(step)], dict(inputs), context)
        made = [outputs[name] for name in row.outputs]
        with Launches(least) as backward:
            torch.autograd.backward(made, [torch.ones_like(value) for value in made])
        values.update({name: outputs[name].detach() for name in row.outputs})
        if (isinstance(row, Attend) and row_is_capped(sizes)) or has_many_scales(row, least):
            continue
        found, foreseen = (forward.count, backward.count), foreseen_launches(row, sizes, recompute)
        if isinstance(row, MixExperts):  # experts have few tokens here, and scores are small
            foreseen = pytest.approx(foreseen, rel=0.3 if widens else 0.2)
        if found != foreseen:
            mistakes.append(f"{row.name}: launches {found}, not {foreseen}")
    return mistakes


def layer_launches(name: str, axis, recipe: str, recompute: str) -> tuple[int, int]:
    """Return the launches of a whole layer, forward and backward, on one rank."""
    precision, widens = RECIPES[recipe]
    placed, _, context = layer_of(name, axis, precision, recompute, widens=widens)
    x = random_tensor("x", (S, B, H), precision).requires_grad_()
    placed.layer(x, context)  # makes the masks of windows, once
    with Launches() as forward:
        y = placed.layer(x, context)
    with Launches() as backward:
        y.backward(torch.ones_like(y))
    return forward.count, backward.count


@pytest.mark.cases(6)
@parallel(ranks=[1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_launches_what_it_says(comm, name):
    """In every precision on one rank, and on two without and with sequence parallelism."""
    require_legal(name, comm.size)
    cases = [(recipe, False) for recipe in RECIPES]  # in one order on all ranks
    if comm.size > 1:
        cases = [("bf16", False), ("fp64", True)]
    with this_trainer():
        mistakes = {
            (recipe, divides): wrong_launches(name, tensor_axis(comm, divides), recipe)
            for recipe, divides in cases
        }
    assert not any(mistakes.values()), mistakes


@parallel(ranks=[1])
@pytest.mark.parametrize("name", SHAPES)
def test_recomputed_rows_launch_what_they_say(comm, name):
    """Selective recomputation launches the core of attention again."""
    axis = tensor_axis(comm, False)
    with this_trainer():
        for recipe in ("fp64", "bf16 widened"):
            mistakes = wrong_launches(name, axis, recipe, "selective")
            assert not mistakes, (recipe, mistakes)


def unreached(row) -> int:
    """Return the launches of the last recomputed row after it has kept its last tensor: there
    recomputation stops."""
    if isinstance(row, AddResidual):
        return 3  # two products of dropout, and the residual sum
    return int(isinstance(row, MixExperts) and len(row.inputs) > 1)  # the shared experts' sum


@parallel(ranks=[1])
@pytest.mark.parametrize("name", SHAPES)
def test_full_recomputation_launches_forwards_again(comm, name):
    """All but what no backward needs: the last rows."""
    axis = tensor_axis(comm, False)
    with this_trainer():
        for recipe in ("fp64", "bf16 widened"):
            precision, widens = RECIPES[recipe]
            _, sizes, _ = layer_of(name, axis, precision, widens=widens)
            rows = operators(describe.layer(sizes.model, 0))
            again = recomputed(rows, sizes)
            spared = sum(foreseen_launches(row, sizes)[0] for row in rows[len(again) :])
            forward, backward = layer_launches(name, axis, recipe, "none")
            foreseen = forward, backward + forward - spared - unreached(again[-1])
            assert layer_launches(name, axis, recipe, "full") == foreseen, recipe


@pytest.mark.parametrize(
    ("kind", "method"),
    [(SplitHeads, "rotations"), (SplitHeads, "_normalised"), (Multiply, "weights")],
)
def test_a_kernel_that_is_not_in_the_account_is_found(kind, method):
    from mpi4py import MPI

    axis = tensor_axis(MPI.COMM_SELF, False)
    with this_trainer(), mock.patch.object(kind, method, lambda self, *given, **named: iter(())):
        for recipe in RECIPES:
            assert wrong_launches("qwen3", axis, recipe) != []


@parallel(ranks=[2])
def test_a_bias_after_a_sum_that_is_not_in_the_account_is_found(comm):
    with this_trainer(), mock.patch.object(Multiply, "_added_bias", lambda *given: iter(())):
        mistakes = wrong_launches("gpt", tensor_axis(comm, False))
    names = [text.split(":")[0] for text in mistakes]
    assert names == ["attention.out", "mlp.down"], mistakes


def test_a_widened_product_that_says_it_is_not_is_found():
    from mpi4py import MPI

    axis = tensor_axis(MPI.COMM_SELF, False)
    with this_trainer(), mock.patch.dict(WIDENED_COPIES, clear=True):
        mistakes = wrong_launches("llama", axis, "bf16 widened")
    assert {text.split(":")[0] for text in mistakes} == {
        "attention.qkv",
        "attention.core",
        "attention.out",
        "mlp.up",
        "mlp.down",
    }
