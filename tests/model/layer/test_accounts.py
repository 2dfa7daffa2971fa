"""Each row of a layer against reality: its multiplications, the bytes that its kernels move, what a
split backward keeps from I to W, and its working memory.

One row runs at a time, on one rank, and PyTorch's dispatcher sees its kernels and their tensors.
`test_rows.py` and `test_launches.py` compare the other fields of a row's account.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import (
    Elementwise,
    Item,
    Kernel,
    MatrixProduct,
    MemoryPass,
    total_bytes,
)
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.attention.heads import SplitHeads
from ptdmpi.plan.layer.chunks import QUERY_BLOCK
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.ends import Predict
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.latent.operators import ExpandOutputs, JoinLatents, SplitLatents
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from tests._accounts import Move, RowWork, works_of
from tests._configs import small
from tests._ends import ENDS, Cut, ends_of
from tests._layers import tensor_axis
from tests._rows import ADAPTED, SHAPES, has_many_scales, require_legal
from tests.model.layer.test_launches import LEAST_LAUNCHED, RECIPES, this_trainer
from tests.model.layer.test_rows import METHODS, B, H, S, kept_by_layer, layer_of
from tests.parallel import names, parallel

MODELS = SHAPES | ADAPTED
SCALED = [recipe for recipe in RECIPES if recipe.startswith("fp8")]
# `make test` runs these cases of the models whose rows differ most. It runs every new model in the
# recipes of NEW.
FEW = {
    "gpt": ("fp32",),
    "qwen3": ("fp32",),
    "llama": ("bf16", "fp8", "fp8 delayed"),
    "experts": ("fp32",),
    "ia3": ("fp32",),
}
LATER = (
    "norms of all heads",
    "qwen2",
    "gemma2",
    "bert",
    "dropout",
    "attention dropout",
    "shared experts",
    "latent",
    "lora",
    "lora of experts",
    "lora beside experts",
)
FEW |= dict.fromkeys(LATER, ())
NEW = ("fp32", "bf16")
CASES = [
    pytest.param(name, recipe, marks=[] if recipe in FEW.get(name, NEW) else pytest.mark.long)
    for name in MODELS
    for recipe in ("fp32", "bf16", "bf16 widened", *SCALED)
    if name in SHAPES or recipe not in SCALED  # of which adapters are refused
]

TWO_RANKS = [
    pytest.param(name, marks=[] if name in ("gpt", "ia3") else pytest.mark.long) for name in MODELS
]


class Bar(NamedTuple):
    """The least and the most of an account that a row may need. `narrow` returns further bytes that
    an account leaves out: vectors, and numbers per row or head."""

    least: float
    most: float = 1.0
    narrow: Callable[[Any, Sizes], int] = lambda row, sizes: 0


def of_norm(row: Normalize, sizes: Sizes) -> int:
    """Statistics, and the gradients of the weights with their copies."""
    return (sizes.tokens + 4 * row.norm.size) * sizes.wide_bytes


def of_heads(row: Operator, sizes: Sizes) -> int:
    """A number for each query of each head, and the gradients of norms over a head."""
    heads = sizes.tokens * sizes.model.heads + 4 * sizes.model.head_size
    return heads * sizes.wide_bytes


def of_core(row: Attend, sizes: Sizes) -> int:
    """A number for each query of each head; and, if scores have a cap, the mask of a block."""
    capped = sizes.model.attention_softcap > 0.0
    mask = capped * QUERY_BLOCK * sizes.model.seq_length * sizes.wide_bytes
    return of_heads(row, sizes) + mask


def of_latents(row: SplitLatents, sizes: Sizes) -> int:
    """Statistics, and the gradients of the weights with their copies."""
    sizes_of_norms = sum(norm.size for _, norm in row.norms)
    return (len(row.norms) * sizes.tokens + 4 * sizes_of_norms) * sizes.wide_bytes


def of_linear(row: Multiply, sizes: Sizes) -> int:
    """The gradient of a bias, or of a scale."""
    return max(row.linear.inputs, sum(row.linear.outputs)) * sizes.wide_bytes


def of_blocks(row: Multiply, sizes: Sizes) -> int:
    """The scales of the weight's blocks, in float32 and in bfloat16, or the greatest magnitudes of
    the weight and of the input; none of other precisions."""
    inputs, outputs = row.linear.local(1)
    blocks = -(-inputs // 128) * -(-outputs // 128) if row.scaling == "block" else 1
    return 6 * blocks * (row.scaling != "none")


# Working memory: what a row needs of its account, and why it may need less. Exact bars are those of
# rows whose account is a list of the tensors at the peak.
BACKWARD = {
    # 0.76: the weights' gradients are counted, also of norms that are frozen
    Normalize: Bar(0.75, narrow=of_norm),
    # 0.86: copies to float32 are counted all together, but the operands' are freed earlier
    Multiply: Bar(0.85, narrow=of_linear),
    SplitHeads: Bar(1.0, narrow=of_heads),
    SplitLatents: Bar(1.0, narrow=of_latents),
    # 0.4: four tensors of all query heads are counted, of which grouped keys and values have fewer,
    # and a fifth is the output, which is there before
    Attend: Bar(0.4, narrow=of_heads),
    Activate: Bar(1.0),
    AddResidual: Bar(1.0),
    # 0.56: any expert may have all tokens
    MixExperts: Bar(0.5),
}
# A linear with adapters has a backward, and is no row of a layer without one.
# 0.83: joined latents are counted with all copies, which are not in memory together
# 0.81: of a narrow input and a wide output, the copies are not in memory together
FORWARD = {
    Multiply: Bar(0.8, narrow=of_blocks),
    Attend: Bar(0.7, narrow=of_core),
    JoinLatents: Bar(0.83),
}
ADDING = {
    # 0: adapters are counted as if inputs were gathered and dropped from
    Multiply: Bar(0.0, narrow=of_linear),
    Normalize: Bar(0.0, narrow=of_norm),
    SplitHeads: Bar(0.0, narrow=of_heads),
    SplitLatents: Bar(0.0, narrow=of_latents),
    MixExperts: Bar(0.4),
}
EXACT = Bar(1.0)
# Rows with norms. Their account does not count on the gradient of the input to take the input's
# place, so the planner predicts more than they need. The scales of norms are not counted in FLOPs.
WITH_NORMS = (Normalize, SplitHeads, SplitLatents)
# Rows that state no memory of a forward without a backward: it is less than that of the linear
# layers next to them.
NO_FORWARD = (
    Normalize,
    SplitHeads,
    AddResidual,
    Activate,
    MixExperts,
    SplitLatents,
    ExpandOutputs,
)

# What this host composes of several kernels, in numbers that it moves for each element in float32.
COMPOSED = {
    "rmsnorm": 7,
    "rmsnorm_backward": 19,
    "swiglu": 5,
    "swiglu_backward": 11,
    "geglu": 5,
    "geglu_backward": 11,
}
# Its kernel of LayerNorm's backward also computes the gradients of the weights, and reads what the
# first pass of the account reads. The last pass of a norm, the sum with the residual's gradient, is
# outside of the row.
ONE_KERNEL = "layernorm_backward"


class Moved(NamedTuple):
    """What an account says of kernels: the bytes of each that is one launch, and of the others."""

    alone: Counter[int]
    together: int


def moved(kernels: Iterable[Kernel], sizes: Sizes) -> Moved:
    """Return the bytes that kernels move on this host."""
    alone: Counter[int] = Counter()
    together = 0
    for kernel in kernels:
        match kernel:
            case MatrixProduct(m, n, k, batch):
                alone[batch * (m * k + k * n + m * n) * sizes.compute_bytes] += 1
            case MemoryPass(size, launches):
                alone[round(size)] += launches == 1
                together += round(size) * (launches > 1)
            case Elementwise(kind, elements, _) if kind in COMPOSED:
                # the norm of keys has its bytes in the kernel of the queries' norm, which is priced
                together += kernel.priced * elements * COMPOSED[kind] * sizes.compute_bytes
            case Elementwise(kind, elements, each):
                first = each[:1] if kind == ONE_KERNEL else each
                alone.update(round(elements * size) for size in first)
    return Moved(+alone, together)


def wrong_moves(row: Operator, sizes: Sizes, work: RowWork) -> Iterator[str]:
    """Yield the directions in which a row's kernels move other bytes than its account says.

    Attention is left out: its account has what FlashAttention needs, not what it moves. So are
    experts, whose kernels are many and small, and adapters, which are narrower than what is seen.
    Half types compose some kernels of others, dropout draws its masks, and a frozen norm computes
    no gradients of weights; there the kernels that are one launch are compared alone.
    """
    if isinstance(row, Attend | MixExperts) or getattr(row, "adapters", ()):
        return
    accounts = (list(row.forward(sizes)), [*row.backward(sizes), *row.weights(sizes)])
    for direction, kernels, seen in zip(("forward", "backward"), accounts, work.works, strict=True):
        said = moved(kernels, sizes)
        real = Counter(move.bytes for move in seen.moves)
        names = {getattr(kernel, "kind", "") for kernel in kernels} & COMPOSED.keys()
        is_half = sizes.compute_bytes < sizes.wide_bytes
        differs = isinstance(row, AddResidual) and sizes.drops
        differs |= has_many_scales(row, LEAST_LAUNCHED)
        differs |= bool(names) and (is_half or (isinstance(row, Normalize) and not row.trains))
        if said.alone - real:
            yield f"{direction} moves {listed(seen.moves)}, not {dict(said.alone)}"
        elif not differs:
            total = sum(said.alone.elements()) + said.together
            if real.total() and sum(real.elements()) != total:
                yield f"{direction} moves {listed(seen.moves)}, not {total} together"


def listed(moves: Iterable[Move]) -> str:
    return ", ".join(f"{move.name} {move.bytes}" for move in moves)


def outside(bar: Bar, row: Operator, sizes: Sizes, *, real: int, said: int) -> str:
    """Return what is wrong with an account of `said` bytes, if `real` bytes were needed."""
    narrow = bar.narrow(row, sizes)
    if bar.least * said <= real <= bar.most * said + narrow:
        return ""
    return f"{real} bytes, not {said}"


def wrong_memory(row: Operator, sizes: Sizes, work: RowWork) -> Iterator[str]:
    """Yield the fields of a row's account whose bytes are not those that the row needed."""
    kind = Multiply if isinstance(row, Multiply) else type(row)
    adapted = bool(getattr(row, "adapters", ()))
    checks = [
        ("operands", EXACT, work.operands, total_bytes(row.operands(sizes))),
        ("backward", BACKWARD.get(kind, EXACT), work.backward_bytes, row.backward_bytes(sizes)),
        ("adds", ADDING.get(kind, EXACT), work.adding_bytes, row.adding_bytes(sizes)),
    ]
    if not isinstance(row, NO_FORWARD) and not adapted:
        checks.append(
            ("forward", FORWARD.get(kind, EXACT), work.forward_bytes, row.forward_bytes(sizes))
        )
    for field, bar, real, said in checks:
        if text := outside(bar, row, sizes, real=real, said=said):
            yield f"{field} {text}"
    # the gradient of a kept input takes its place, in the rows whose account counts on it
    if isinstance(row, Multiply | Activate | MixExperts):
        keeps = work.keeps_input or getattr(row, "shares_input", False)
        rows, width = sizes.rows("whole"), width_of(row, sizes)
        size = rows * width * sizes.compute_bytes
        if getattr(row, "keeps_codes", False):  # a byte each, and a scale for each block of 128
            keeps, size = True, rows * width
            size += 4 * rows * -(-width // 128) * (row.scaling == "block")
            if row.excess_bytes(sizes) != rows * width * sizes.compute_bytes - size:
                yield f"exceeds by {row.excess_bytes(sizes)} bytes"
        if row.replaced_bytes(sizes) != size * (keeps and len(row.inputs) == 1):
            yield f"replaces {row.replaced_bytes(sizes)} bytes, not {size * keeps}"
    elif not isinstance(row, WITH_NORMS):
        size = work.input_bytes * (work.keeps_input and len(row.inputs) == 1)
        if row.replaced_bytes(sizes) != size:
            yield f"replaces {row.replaced_bytes(sizes)} bytes, not {size}"
    elif row.replaced_bytes(sizes):
        yield f"replaces {row.replaced_bytes(sizes)} bytes"


def width_of(row: Multiply | Activate | MixExperts, sizes: Sizes) -> int:
    """Return the width of the row's input."""
    match row:
        case Multiply():
            return row.linear.inputs
        case Activate():
            return row.gates * row.width
    return sizes.model.hidden


def wrong_multiplications(row: Operator, sizes: Sizes, work: RowWork) -> Iterator[str]:
    """Yield a row's multiplications if they are not those that its kernels computed.

    Over scores outside of a sliding window the kernels compute, and the account is a mean over the
    layers. They also multiply the zeros that fill the values of latent attention up. Elementwise
    kernels also multiply numbers that are no parameters, so their products are an upper bound.
    """
    kernels = [*row.forward(sizes)]
    said = row.multiplications(sizes.model) * sizes.tokens
    if kernels and all(isinstance(kernel, Elementwise | MemoryPass) for kernel in kernels):
        scaled = work.works[0].scaled
        if said > scaled or (not said and row.parts() and not isinstance(row, WITH_NORMS)):
            yield f"multiplies {scaled} times at most, and at least once, not {said}"
        return
    if isinstance(row, Attend):
        queries, values = sizes.model.attention_width, sizes.model.values_width
        said *= sizes.model.seq_length / sizes.model.mean_keys * 2 * queries / (queries + values)
    if said != work.works[0].multiplications:
        yield f"multiplies {work.works[0].multiplications} times, not {said}"


class Measured(NamedTuple):
    """The sizes of a layer, and each of its rows with what it did."""

    sizes: Sizes
    rows: list[tuple[Operator, RowWork]]


@cache
def measured(name: str, recipe: str) -> Measured:
    """Run each row of a layer. Accounts do not change what it does."""
    precision, widens = RECIPES[recipe]
    with this_trainer():
        placed, sizes, context = layer_of(name, TensorAxis(OneRank()), precision, widens=widens)
        return Measured(sizes, [*works_of(placed, context, LEAST_LAUNCHED, (S, B, H))])


def wrong_accounts(name: str, recipe: str) -> list[str]:
    """Return the rows whose account is not what was measured, and in which respect."""
    sizes, rows = measured(name, recipe)
    mistakes = []
    for row, work in rows:
        wrong = [*wrong_multiplications(row, sizes, work), *wrong_memory(row, sizes, work)]
        if not sizes.software.wide_products:  # of whose copies only the launches are in the account
            wrong += wrong_moves(row, sizes, work)
        mistakes += [f"{row.name}: {text}" for text in wrong]
    return mistakes


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_every_row_does_what_it_says(name, recipe):
    assert wrong_accounts(name, recipe) == []


def without_last(whole: Callable[..., Any], *given: Any) -> list[Any]:
    """Return all entries of an account but the last one."""
    return [*whole(*given)][:-1]


def another_item(whole: Callable[..., Any], *given: Any) -> list[Item]:
    """Return an account of tensors with one number more."""
    return [*whole(*given), Item("planted", 1, 4)]


def other_bytes(whole: Callable[..., Any], *given: Any) -> list[Kernel]:
    """Return an account whose passes over memory move twice the bytes."""
    return [doubled(kernel) for kernel in whole(*given)]


def doubled(kernel: Kernel) -> Kernel:
    match kernel:
        case MemoryPass(size, launches):
            return MemoryPass(2 * size, launches)
        case Elementwise(kind, elements, each):
            return Elementwise(kind, 2 * elements, each)
    return kernel


def nothing(whole: Callable[..., Any], *given: Any) -> int:
    """Return an account of 0."""
    return 0


def half_more(whole: Callable[..., Any], *given: Any) -> float:
    """Return 1.5 times an account."""
    return 1.5 * whole(*given)


PLANTED = {  # in rows of "gpt", or of "experts"
    "a linear multiplies more": (Multiply, "multiplications", half_more),
    "attention multiplies nothing": (Attend, "multiplications", nothing),
    "experts multiply more": (MixExperts, "multiplications", half_more),
    "a norm keeps no gradient": (Normalize, "operands", without_last),
    "a linear keeps one number more": (Multiply, "operands", another_item),
    "experts keep no operand of the router": (MixExperts, "operands", without_last),
    "a linear's backward needs nothing": (Multiply, "backward_bytes", nothing),
    "a norm's backward needs nothing": (Normalize, "backward_bytes", nothing),
    "heads need nothing": (SplitHeads, "backward_bytes", nothing),
    "attention's backward needs nothing": (Attend, "backward_bytes", nothing),
    "an activation's backward needs more": (Activate, "backward_bytes", half_more),
    "a linear's forward needs nothing": (Multiply, "forward_bytes", nothing),
    "attention's forward needs nothing": (Attend, "forward_bytes", nothing),
    "a linear replaces nothing": (Multiply, "replaced_bytes", nothing),
    "an activation replaces more": (Activate, "replaced_bytes", half_more),
    "a linear moves more": (Multiply, "backward", other_bytes),
    "a norm moves more": (Normalize, "forward", other_bytes),
    "heads move more": (SplitHeads, "backward", other_bytes),
    "an activation moves more": (Activate, "backward", other_bytes),
    "a residual sum moves more": (AddResidual, "forward", other_bytes),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error):
    """In rows of the kind, and in no other."""
    kind, method, broken = PLANTED[error]
    whole = getattr(kind, method)
    name = "experts" if kind is MixExperts else "gpt"
    with mock.patch.object(kind, method, lambda *given: broken(whole, *given)):
        mistakes = wrong_accounts(name, "fp32")
    wrong = {text.partition(":")[0] for text in mistakes}
    rows = operators(describe.layer(small(MODELS[name]).model))
    assert wrong and wrong <= {row.name for row in rows if isinstance(row, kind)}, mistakes


@parallel(ranks=[2])
@names(MODELS, short=("gpt", "ia3"))
def test_a_tensor_rank_keeps_the_operands_of_its_rows(comm, name):
    """Sequence parallelism keeps only those at this rank's positions."""
    require_legal(name, comm.size)
    for divides in (False, True):
        placed, sizes, context = layer_of(name, tensor_axis(comm, divides), "fp32")
        for row, work in works_of(placed, context, LEAST_LAUNCHED, (S, B, H)):
            assert work.operands == total_bytes(row.operands(sizes)), (row.name, divides)


@pytest.mark.parametrize("name", ENDS)
def test_the_rows_of_a_head_multiply_what_they_say(name):
    """For each row of their input, of which the head predicts some positions of each sequence."""
    ends = ends_of(name, TensorAxis(OneRank()), "fp32")
    runs = Cut(ends, "head").runs
    for row in ends.descriptions()["head"]:
        if isinstance(row, Multiply | Predict):
            count = ends.sizes.rows(getattr(row, "rows", "predicted"))
            said = 2 * row.multiplications(ends.sizes.model) * count
            assert runs[row.name].flops[0] == said, row.name


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("name", [pytest.param("lora", marks=pytest.mark.long), "ia3"])
def test_a_layer_with_adapters_keeps_what_its_rows_say(comm, name):
    """On one rank, and by each method on two context ranks. A frozen last linear of attention
    without adapters keeps no input."""
    alone = TensorAxis(OneRank())
    cuts = [None]
    if comm.size > 1:
        cuts = [ContextAxis(MpiCommunicator(comm), method) for method in METHODS]
    for cut in cuts:
        for precision, widens in (("fp64", False), ("bf16", True)):
            for mode in ("none", "selective", "full"):
                real, said = kept_by_layer(name, alone, precision, mode, widens=widens, cut=cut)
                assert real == said, (cut and cut.method, precision, mode)
