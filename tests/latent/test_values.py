"""Attention whose values are smaller than its keys: each core, what it saves, and its row."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from ptdmpi.comm.communicator import OneRank
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.config import Layout
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import attention
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import Scores, Sight
from ptdmpi.model.kernels.choice import AttentionByLibrary, AttentionByProducts
from ptdmpi.model.latent.filled import FilledAttention, FilledWork
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import FusedAttention, total_bytes
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.machine.cluster import TRAINER
from tests._configs import small
from tests._layers import difference
from tests._rows import LATENT, SHAPES
from tests.model.layer.test_rows import kept_by_layer, wrong
from tests.model.test_attention_core import by, explicit, packed, random_numbers
from tests.parallel import parallel

B, HEADS, S, D, V = 2, 4, 300, 24, 16
CAUSAL, BOTH_SIDES = Scores(0.2), Scores(0.2, causal=False)
WINDOW, CAP = Scores(0.2, window=40), Scores(0.2, softcap=0.8)
KERNELS = {
    "ProductKernel": by(AttentionByProducts()),
    "kept ProductKernel": by(AttentionByProducts(keeps=True)),
    "ProductKernel after the library": by(AttentionByProducts(library_forward=True)),
}
CASES = [
    ("ProductKernel", CAUSAL, False),
    ("kept ProductKernel", CAUSAL, True),
    ("ProductKernel after the library", CAUSAL, False),
    ("ProductKernel", CAP, False),
    ("PackedKernel", WINDOW, True),
    ("MaskedKernel", WINDOW, True),
    ("BlockedKernel", CAUSAL, False),
    ("BlockedKernel", WINDOW, True),
    ("WholeKernel", CAUSAL, False),
    ("WholeKernel", BOTH_SIDES, False),
]


def random_operands(dtype=torch.float64):
    """Queries, keys and values, as a layer makes them: the positions are the first dim in memory.
    The last tensor has the gradients of the outputs."""
    torch.manual_seed(7)
    shapes = [(S, B, HEADS, size) for size in (D, D, V, V)]
    each = [torch.randn(shape, dtype=dtype).permute(1, 2, 0, 3) for shape in shapes]
    return [x.requires_grad_() for x in each[:3]], each[3]


def computed(core, operands, dout):
    """Return the output, and the gradients of queries, keys and values."""
    out = core(*operands)
    return [out.detach(), *torch.autograd.grad(out, operands, dout)]


def core_of(name, scores) -> AttentionCore:
    """Return a core that computes with one implementation alone."""
    core = AttentionCore(scores, KERNELS.get(name, by(AttentionByLibrary())))
    core.implementations = tuple(
        each for each in core.implementations if type(each).__name__ in name.split()
    )
    for each in core.implementations:
        each.takes = lambda given: True
    return core


@pytest.mark.parametrize(("name", "scores", "in_documents"), CASES)
def test_every_core_takes_smaller_values(name, scores, in_documents):
    operands, dout = random_operands()
    numbers = random_numbers(B, S) if in_documents else None
    documents = None if numbers is None else Documents.of(numbers)
    core = core_of(name, scores)
    with mock.patch.object(attention, "_packed_attention", lambda: packed):
        found = computed(lambda *given: core(*given, documents), operands, dout)
    expected = computed(lambda *given: explicit(*given, scores, numbers), operands, dout)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("scores", [CAUSAL, BOTH_SIDES, WINDOW, CAP])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float32", 1e-4)])
def test_kernels_of_a_gpu_take_smaller_values(dtype, tolerance, scores, in_documents):
    operands, dout = random_operands(getattr(torch, dtype))
    numbers = random_numbers(B, S) if in_documents else None
    documents = None if numbers is None else Documents.of(numbers).each(torch.Tensor.cuda)
    given = [x.detach().cuda().requires_grad_() for x in operands]
    core = AttentionCore(scores)
    found = computed(lambda *each: core(*each, documents), given, dout.cuda())
    wide = [x.detach().double().requires_grad_() for x in operands]
    expected = computed(lambda *each: explicit(*each, scores, numbers), wide, dout.double())
    for mine, true in zip(found, expected, strict=True):
        assert difference(mine.cpu().double(), true) < tolerance


@pytest.mark.parametrize("scores", [CAUSAL, WINDOW, CAP], ids=["causal", "window", "cap"])
def test_new_tokens_take_smaller_values(scores):
    (q, k, v), _ = random_operands()
    seen = ~attention.hidden_keys(k, Sight(scores))[None, None, -3:].expand(B, 1, 3, S)
    found = AttentionCore(scores).under_mask(q[:, :, -3:], k, v, seen)
    torch.testing.assert_close(found, explicit(q, k, v, scores)[:, :, -3:])


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", ["BlockedKernel", "WholeKernel"])
def test_no_zeros_are_saved_and_no_bit_changes(name, precision):
    """Against values that were filled up before attention."""
    operands, dout = random_operands(getattr(torch, precision))
    core = core_of(name, CAUSAL)
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = core(*operands)
    found = [out.detach(), *torch.autograd.grad(out, operands, dout)]
    wide = torch.promote_types(dout.dtype, torch.float32).itemsize
    elements = B * HEADS * S
    assert sum(saved.values()) == elements * ((2 * D + 2 * V) * dout.itemsize + wide)

    def filled(q, k, v):
        return core(q, k, F.pad(v, (0, D - V)))[..., :V]

    assert all(map(torch.equal, found, computed(filled, operands, dout)))


def test_flash_attention_saves_no_zeros():
    """By the shapes of its tensors, which have no data: there need be no GPU."""
    saved = []
    shapes = [(S, B, HEADS, size) for size in (D, D, V)]
    each = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    operands = [x.permute(1, 2, 0, 3).requires_grad_() for x in each]
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, sums = FilledAttention.apply(*operands, FilledWork(True, 0.2))
    gradients = torch.autograd.grad(out, operands, torch.ones_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in operands]
    assert out.shape == (B, HEADS, S, V) and out.permute(2, 0, 1, 3).is_contiguous()
    assert [x.shape for x in saved] == [x.shape for x in (*operands, out, sums)]


MODELS = {
    "latent cap": LATENT | {"model.attention_softcap": 2.0},
    "latent window": LATENT | {"model.sliding_window": 4},
    "latent dropout": LATENT | {"model.attention_dropout": 0.1},
}


@pytest.mark.cases(2)
@parallel(ranks=[2])
@pytest.mark.parametrize("method", [None, "all_gather", "ulysses", "ring"])
@pytest.mark.parametrize("name", MODELS)
def test_every_row_does_what_it_says(comm, name, method):
    if name == "latent window" and method == "ring":
        return  # of whose FLOPs the row has a mean over layers and ranks
    cut = None if method is None else ContextAxis(MpiCommunicator(comm), method)
    axis = TensorAxis(OneRank())
    with mock.patch.dict(SHAPES, MODELS):
        assert wrong(name, axis, context=cut) == []
        for precision, mode in (("fp64", "none"), ("bf16", "selective")):
            real, said = kept_by_layer(name, axis, precision, mode, cut=cut)
            assert real == said, (precision, mode)


def core_row(changes, precision, **layout) -> tuple[Attend, Sizes]:
    """Return the row of the core, and the sizes of its model on a GPU."""
    shape = {"model.hidden": 32, "model.heads": HEADS, "model.seq_length": 64}
    model = small({**shape, **LATENT, **changes}).model
    sizes = Sizes(model, Layout(1, 1, 1, micro_size=B, **layout), precision, TRAINER, on_host=False)
    (row,) = (row for row in operators(describe.layer(model)) if isinstance(row, Attend))
    return row, sizes


@pytest.mark.parametrize(
    ("precision", "changes", "zeros"),
    [
        ("bf16", {}, 0),
        ("fp32", {}, 0),
        # filled values, and filled outputs next to the outputs
        ("bf16", {"model.sliding_window": 8}, 2 * (32 - 8) + 8),
    ],
)
def test_the_row_of_a_gpu_keeps_values_of_their_own_size(precision, changes, zeros):
    row, sizes = core_row(changes, precision)
    rows = 64 * B * HEADS
    elements = 2 * 32 + 2 * 8 + zeros
    kept = rows * (elements * sizes.compute_bytes + sizes.wide_bytes)
    assert total_bytes(row.kept(sizes, "none")) == kept


def test_the_row_of_a_gpu_counts_the_zeros_that_its_kernel_multiplies():
    """FlashAttention multiplies zeros, the kernel for wide types does not."""
    scores = 64 * 64 * B * HEADS
    for precision, sizes_of_values in (("bf16", 32), ("fp32", 8)):
        row, sizes = core_row({}, precision)
        kernels = [[*row.core(sizes, backward)] for backward in (False, True)]
        forward, backward = (
            sum(each.flops for each in way if isinstance(each, FusedAttention)) for way in kernels
        )
        assert forward == 2 * scores * (32 + sizes_of_values)
        assert backward == pytest.approx(2 * scores * (3 * 32 + 2 * sizes_of_values))
        assert [len(way) for way in kernels] == ([3, 4] if precision == "bf16" else [1, 1])
