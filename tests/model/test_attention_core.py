"""Attention in blocks of queries, in documents, windows and under a cap, is attention."""

import tomllib
from functools import partial
from importlib.resources import files
from unittest import mock

import pytest
import torch

from benchmarks.planning.allocated import measured
from ptdmpi.config import Layout
from ptdmpi.model.documents import Documents
from ptdmpi.model.kernels import USUAL, Kernels, by_products, host
from ptdmpi.model.kernels import activation as activation_kernels
from ptdmpi.model.kernels import attention as attention_core
from ptdmpi.model.kernels import choice as choices
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import BlockedAttention, Scores, Sight
from ptdmpi.model.kernels.choice import AttentionByLibrary, AttentionByProducts, HostChoice
from ptdmpi.model.kernels.norm import soft_cap
from ptdmpi.plan.layer import chunks
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.machine.cluster import TRAINER
from tests._configs import small
from tests._items import layer_items
from tests._layers import DTYPES
from tests._rows import program

HALF = [("float64", 1e-12), ("bfloat16", 2e-2)]
SIZE = 8
PLAIN, BOTH_SIDES = Scores(SIZE**-0.5), Scores(SIZE**-0.5, causal=False)
KINDS = {
    "window of 1": Scores(0.3, window=1),
    "window of 7": Scores(0.3, window=7),
    "window of 150": Scores(0.3, window=150),
    "cap": Scores(0.4, softcap=0.8),
    "cap and window": Scores(0.4, window=40, softcap=0.8),
    "cap, both sides": Scores(0.4, causal=False, softcap=0.8),
}


def by(attention) -> Kernels:
    """Kernels that compute causal attention so, whatever this processor would choose."""
    return Kernels(HostChoice(attention))


def explicit(q, k, v, scores, numbers=None):
    """Attention written out; `numbers` of documents."""
    return explicit_with_sums(q, k, v, scores, numbers)[0]


def explicit_with_sums(q, k, v, scores, numbers=None):
    """The result, and the logarithm of each query's sum of exponentials."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    products = q @ k.transpose(-1, -2) * scores.scale
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    query, key = (torch.arange(q.shape[2]).view(shape) for shape in ((-1, 1), (1, -1)))
    hidden = (key > query) & torch.tensor(scores.causal)
    if scores.window:
        hidden = hidden | (key <= query - scores.window)
    if numbers is not None:
        hidden = hidden | (numbers[:, None, :, None] != numbers[:, None, None, :])
    products = products.masked_fill(hidden, -torch.inf)
    return products.softmax(-1) @ v, products.logsumexp(-1)


def random_numbers(rows: int, length: int) -> torch.Tensor:
    """Document numbers [rows, length]; the first row is one document."""
    generator = torch.Generator().manual_seed(length)
    ends = torch.rand(rows, length, generator=generator) < 0.05
    ends[0] = False
    return ends.cumsum(1)


@pytest.mark.parametrize("precision, tolerance", HALF)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("scores", [PLAIN, BOTH_SIDES], ids=["causal", "both sides"])
@pytest.mark.parametrize("seq_length", [1, 5, 128, 129, 300])
def test_attention_matches_explicit(seq_length, scores, kv_heads, precision, tolerance):
    check(seq_length, kv_heads, precision, tolerance, scores, None)


@pytest.mark.parametrize("precision, tolerance", HALF)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("scores", [PLAIN, BOTH_SIDES], ids=["causal", "both sides"])
@pytest.mark.parametrize("seq_length", [1, 40, 300])
def test_attention_of_documents_matches_explicit(
    seq_length, scores, kv_heads, precision, tolerance
):
    numbers = random_numbers(2, seq_length)
    check(seq_length, kv_heads, precision, tolerance, scores, numbers)


@pytest.mark.parametrize("precision, tolerance", HALF)
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_length", [5, 300])
def test_windows_and_caps_match_explicit(seq_length, kind, in_documents, precision, tolerance):
    numbers = random_numbers(2, seq_length) if in_documents else None
    check(seq_length, 2, precision, tolerance, KINDS[kind], numbers)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_see_what_all_at_once_would(kind, kv_heads):
    """Attention under a mask, of the last queries alone, as the key-value cache asks for it."""
    q = torch.randn(2, 4, 20, SIZE, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 20, SIZE, dtype=torch.float64)
    hidden = attention_core.hidden_keys(q, Sight(KINDS[kind]))
    seen = torch.ones(20, 20, dtype=torch.bool) if hidden is None else ~hidden
    seen = seen[None, None, -3:].expand(2, 1, 3, 20)
    found = AttentionCore(KINDS[kind]).under_mask(q[:, :, -3:], k, v, seen)
    torch.testing.assert_close(found, explicit(q, k, v, KINDS[kind])[:, :, -3:])


def packed(q, k, v, *places, scale, window_size, enable_gqa):
    """Attention of sequences laid end to end, [tokens, heads, head size], one by one."""
    offsets, offsets_k, longest, longest_k = places
    assert torch.equal(offsets, offsets_k) and offsets.dtype == torch.int32
    assert longest == longest_k == offsets.diff().max() and offsets[0] == 0
    assert offsets[-1] == len(q) and enable_gqa == (q.shape[1] != k.shape[1])
    before, behind = window_size
    scores = Scores(scale, behind == 0, before + 1)
    parts = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        own = (part[None, begin:end].transpose(1, 2) for part in (q, k, v))
        parts.append(explicit(*own, scores)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("scores", [PLAIN, BOTH_SIDES, KINDS["window of 7"]])
@pytest.mark.parametrize("half", [True, False])
def test_the_way_of_devices_matches_explicit(half, scores, in_documents, kv_heads):
    """What stands around torch's packed kernel, and the mask where that cannot be taken."""
    numbers = random_numbers(2, 50) if in_documents else None
    with mock.patch.object(attention_core, "_packed_attention", lambda: packed):
        kernel = (
            attention_core.PackedKernel(scores) if half else attention_core.MaskedKernel(scores)
        )
        check(50, kv_heads, "float64", 1e-12, scores, numbers, only=kernel)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("scores", [PLAIN, BOTH_SIDES, *KINDS.values()])
def test_kernels_of_a_device_match_explicit(scores, in_documents, kv_heads):
    assert attention_core._packed_attention() is not None
    numbers = random_numbers(2, 300) if in_documents else None
    check(300, kv_heads, "bfloat16", 2e-2, scores, numbers, device="cuda")
    check(300, kv_heads, "float32", 1e-4, scores, numbers, device="cuda")


@pytest.mark.parametrize("precision, tolerance", HALF)
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(
    "at_once, way",
    [
        (1000, {"fpmath": True}),
        (1 << 20, {"block": 256}),
        (1 << 20, {"library_forward": True, "fpmath": True}),
    ],
)
def test_products_match_explicit(
    window, kv_heads, at_once, way, in_documents, precision, tolerance
):
    """Whatever this processor would choose, however many heads and queries are taken at once, there
    and back or after the library's kernel; scores are float32 in any mode."""
    numbers = random_numbers(2, 300) if in_documents else None
    scores = Scores(SIZE**-0.5, window=window)
    kernels = by(AttentionByProducts(**way))
    settings, modes = torch.backends.mkldnn.matmul, []
    before = settings.fp32_precision

    def products(*asked):
        modes.append(settings.fp32_precision)
        return took(*asked)

    took = by_products._products
    with (
        mock.patch.object(by_products, "BLOCK_SCORES", at_once),
        mock.patch.object(by_products, "_products", products),
        mock.patch.object(by_products, "_weighted", side_effect=by_products._weighted) as asked,
    ):
        check(300, kv_heads, precision, tolerance, scores, numbers, kernels=kernels)
    # backward, and forward; with logarithms of sums asked for, and without
    assert asked.call_count == 2 * (1 if way.get("library_forward") else 2)
    assert set(modes) == {"bf16" if way.get("fpmath") and precision == "bfloat16" else before}
    assert settings.fp32_precision == before


@pytest.mark.parametrize("whole_from", [300, 301])
def test_products_leave_long_ones_to_the_library(whole_from):
    """A window keeps the products, because its blocks see few keys."""
    kernels = by(AttentionByProducts(whole_from=whole_from))
    with mock.patch.object(by_products, "_weighted", side_effect=by_products._weighted) as asked:
        check(300, 4, "float32", 1e-5, Scores(SIZE**-0.5), None, kernels=kernels)
        assert asked.called == (whole_from > 300)
        check(300, 4, "float32", 1e-5, Scores(SIZE**-0.5, window=7), None, kernels=kernels)
        assert asked.called


@pytest.mark.parametrize("whole_from", [300, 301])
def test_the_library_takes_long_ones_at_once(whole_from):
    """Where that is the quicker way; documents and windows are in blocks all the same."""
    blocks, scores = BlockedAttention, Scores(SIZE**-0.5)
    kernels = by(AttentionByLibrary(whole_from))
    with mock.patch.object(blocks, "forward", side_effect=blocks.forward) as asked:
        check(300, 4, "float32", 1e-5, scores, None, kernels=kernels)
        assert asked.called == (whole_from > 300)
        check(300, 4, "float32", 1e-5, scores, random_numbers(2, 300), kernels=kernels)
        assert asked.called


@pytest.mark.parametrize(
    "ways",
    [{"block": 128}, {"block": 256}, {"block": 512}, {"library_forward": True, "fpmath": True}],
)
def test_products_of_half_types_are_hardly_less_exact_than_the_library(ways):
    """By no more than half where the processor multiplies half types and the way is taken; where
    the library widens them its error is smaller. With scores rounded to a half type it would be by
    far more."""
    bar = 1.5 if host.multiplies("cpu", torch.bfloat16) else 2.0
    generator = torch.Generator().manual_seed(1)
    shape = (1, 2, 300, 64)
    operands = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
    dout = torch.randn(shape, generator=generator).bfloat16()

    scores = Scores(0.25)

    def gradients(attention, dtype):
        leaves = [one.to(dtype).requires_grad_() for one in operands]
        return torch.autograd.grad(attention(*leaves), leaves, dout.to(dtype))

    def errors(attention):
        found = gradients(AttentionCore(scores, by(attention)), torch.bfloat16)
        return [(mine - true).norm() / true.norm() for mine, true in zip(found, exact, strict=True)]

    exact = gradients(lambda q, k, v: explicit(q, k, v, scores), torch.float64)
    both = errors(AttentionByProducts(**ways)), errors(AttentionByLibrary())
    for mine, library in zip(*both, strict=True):
        assert mine <= bar * library


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_kept_probabilities_have_the_bits_of_those_computed_again(block, precision):
    """They take the bytes that the account of memory has: each block's, of all keys to its end."""
    draw = torch.Generator().manual_seed(2)
    dtype = getattr(torch, precision)
    shapes = ((2, 4, 300, SIZE), (2, 2, 300, SIZE), (2, 2, 300, SIZE))
    numbers = random_numbers(2, 300)

    def results(keeps, documents):
        operands = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
        leaves = [one.requires_grad_() for one in operands]
        kept = []
        core = AttentionCore(PLAIN, by(AttentionByProducts(block, keeps)))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            out = core(*leaves, documents)
        return (out, *torch.autograd.grad(out.sum(), leaves)), sum(one.nbytes for one in kept)

    for documents in (None, Documents.of(numbers)):
        draw.manual_seed(2)
        again, least = results(False, documents)
        draw.manual_seed(2)
        kept, most = results(True, documents)
        assert all(map(torch.equal, again, kept))
        if documents is None:
            model = {"model.hidden": 4 * SIZE, "model.heads": 4, "model.seq_length": 300}
            sizes = Sizes(
                small(model).model,
                Layout(1, 1, 1, micro_size=2),
                {"bfloat16": "bf16", "float32": "fp32"}[precision],
                TRAINER.model_copy(update=AttentionByProducts(block, keeps=True).blocks),
            )
            items = {item.name: item.bytes for item in layer_items(sizes, "none")}
            assert most - least == items["attention.probabilities"]


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("precision", "half"),
    [("fp64", "native"), ("fp32", "native"), ("bf16", "native"), ("bf16", "widened")],
)
def test_working_memory_of_products_is_that_of_the_account(precision, half, kv_heads, block):
    """With the scores of all heads at once, and of one group of heads at a time. The operands are
    views of other memory layouts, as in a layer."""
    dtype, length, batch = DTYPES[precision], 512, 2
    kernels = Kernels(HostChoice(AttentionByProducts(block), half=half))
    core = AttentionCore(PLAIN, kernels)
    model = {"model.kind": "llama", "model.hidden": 4 * SIZE, "model.kv_heads": kv_heads}
    sizes = Sizes(
        small({**model, "model.heads": 4, "model.seq_length": length}).model,
        Layout(1, 1, 1, micro_size=batch),
        precision,
        program(kernels, precision),
    )
    row = Attend("attention.core", ("q", "k", "v"), ("x",))
    for at_once in (1 << 20, 1):
        with (
            mock.patch.object(by_products, "BLOCK_SCORES", at_once),
            mock.patch.object(chunks, "BLOCK_SCORES", at_once),
        ):
            shapes = [(length, batch, heads, SIZE) for heads in (4, kv_heads, kv_heads)]
            operands = [torch.randn(shape).to(dtype).permute(1, 2, 0, 3) for shape in shapes]
            core(*operands, None)  # makes the mask
            _, forward = measured(lambda given=operands: core(*given, None))
            forward += sum(one.nbytes for one in operands)
            assert 0.9 * row.forward_bytes(sizes) < forward <= row.forward_bytes(sizes)
            out = core(*(one.requires_grad_() for one in operands), None)
            gradient = torch.randn_like(out)
            _, backward = measured(partial(torch.autograd.grad, out, operands, gradient))
            backward += gradient.nbytes
            assert 0.9 * row.backward_bytes(sizes) < backward <= row.backward_bytes(sizes)


def test_the_table_of_ways_is_sound():
    """Each entry names a type that torch has and a way that there is, and one way is known for a
    processor that is not in it."""
    text = files("ptdmpi").joinpath("presets", "kernels.toml").read_text()
    known = {"attention": ("products", "library"), "gelu": ("sigmoid", "library")}
    for kind, ways in known.items():
        for entry in tomllib.loads(text)[kind]:
            assert isinstance(getattr(torch, entry["type"]), torch.dtype)
            assert entry["way"] in ways and entry["measured"]
            assert entry.get("block", 128) in (128, 256, 512)
            assert not entry.get("keeps", False)  # memory, of which nobody was asked
    for capabilities, products in (
        ({}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
    ):
        ask = choices.usual_choice.__wrapped__  # whatever was answered before
        with mock.patch.object(torch.cpu, "get_capabilities", return_value=capabilities):
            attention = ask("cpu", torch.bfloat16).attention
            assert isinstance(attention, AttentionByProducts) == products
            assert isinstance(ask("cuda", torch.bfloat16).attention, AttentionByLibrary)


def test_documents_know_their_places():
    numbers = torch.tensor([[7, 7, 7, 9, 9], [1, 2, 2, 2, 2]])
    documents = Documents.of(numbers)
    assert documents.positions.t().tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert documents.pieces == ((0, 0, 3), (0, 3, 5), (1, 0, 1), (1, 1, 5))
    assert documents.offsets.tolist() == [0, 3, 5, 6, 10] and documents.longest == 4
    assert torch.equal(documents.others()[:, 0], numbers[:, :, None] != numbers[:, None, :])


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gated_units_and_caps_have_their_gradients(activation):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: activation_kernels.gated(x, activation), x)
    assert torch.autograd.gradcheck(lambda x: soft_cap(x, 0.7), x)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("precision, tolerance", [*HALF, ("float32", 1e-5)])
@pytest.mark.parametrize(
    "name, scores",
    [
        ("ProductKernel", PLAIN),
        ("ProductKernel", KINDS["cap and window"]),
        ("ProductKernel", KINDS["cap, both sides"]),
        ("kept ProductKernel", PLAIN),
        ("ProductKernel after the library", KINDS["window of 150"]),
        ("MaskedKernel", PLAIN),
        ("MaskedKernel", BOTH_SIDES),
        ("MaskedKernel", KINDS["window of 7"]),
        ("BlockedKernel", PLAIN),
        ("BlockedKernel", KINDS["window of 150"]),
        ("WholeKernel", PLAIN),
        ("WholeKernel", BOTH_SIDES),
    ],
)
def test_every_implementation_gives_results_gradients_and_sums(
    name, scores, precision, tolerance, in_documents, kv_heads
):
    """Against attention written out in float64; asked for the sums or not, to the same bits."""
    if name == "WholeKernel" and in_documents:
        return  # it never gets them
    kernels = {
        "kept ProductKernel": by(AttentionByProducts(block=256, keeps=True)),
        "ProductKernel after the library": by(AttentionByProducts(library_forward=True)),
    }.get(name, by(AttentionByProducts()) if name == "ProductKernel" else by(AttentionByLibrary()))
    (kernel,) = (
        one
        for one in AttentionCore(scores, kernels).implementations
        if type(one).__name__ in name.split()
    )
    numbers = random_numbers(2, 300) if in_documents else None
    check(300, kv_heads, precision, tolerance, scores, numbers, only=kernel)


def test_the_last_implementation_takes_everything():
    """And each of the others what it says."""
    q, k, v = (torch.zeros(1, 2, 200, SIZE) for _ in "qkv")
    documents = Documents.of(random_numbers(1, 200))
    for scores, given, kernels, name in (
        (PLAIN, (q, k, v), by(AttentionByProducts()), "ProductKernel"),
        (PLAIN, (q, k[:, :1], v[:, :1]), by(AttentionByProducts()), "ProductKernel"),
        (KINDS["cap"], (q, k, v), USUAL, "ProductKernel"),
        (PLAIN, (q, k, v), by(AttentionByLibrary()), "BlockedKernel"),
        (PLAIN, (q, k, v, documents), by(AttentionByLibrary()), "BlockedKernel"),
        (KINDS["window of 7"], (q, k, v), by(AttentionByLibrary()), "BlockedKernel"),
        (PLAIN, (q, k[:, :1], v[:, :1]), by(AttentionByLibrary()), "WholeKernel"),
        (PLAIN, (q, k, v), by(AttentionByLibrary(whole_from=200)), "WholeKernel"),
        (BOTH_SIDES, (q, k, v), by(AttentionByProducts()), "WholeKernel"),
        (BOTH_SIDES, (q, k, v, documents), by(AttentionByProducts()), "BlockedKernel"),
    ):
        core = AttentionCore(scores, kernels)
        given = attention_core.Input(*given, *[None] * (4 - len(given)))
        takes = [type(one).__name__ for one in core.implementations if one.takes(given)]
        assert takes[0] == name and takes[-1] == "WholeKernel"


def check(
    seq_length,
    kv_heads,
    precision,
    tolerance,
    scores,
    numbers,
    **computing,
):
    """Output and gradients of the project's attention are those of the explicit one, and so are its
    logarithms of sums, where it has them. `computing`: on which device, by which kernels, and by
    which implementation alone."""
    device, only = computing.get("device", "cpu"), computing.get("only")
    kernels = computing.get("kernels", USUAL)
    generator = torch.Generator().manual_seed(seq_length)
    heads = 4
    # cut out of one tensor, sequence first, as a layer does
    fused = torch.randn(seq_length, 2, (heads + 2 * kv_heads) * SIZE, generator=generator)
    fused = fused.to(getattr(torch, precision))
    dout = torch.randn(2, heads, seq_length, SIZE, generator=generator).to(fused.dtype)

    def results(attention, x, documents):
        x = x.detach().requires_grad_()
        parts = x.split([heads * SIZE, kv_heads * SIZE, kv_heads * SIZE], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, SIZE)).permute(1, 2, 0, 3) for part in parts)
        out, sums = attention(q, k, v, documents)
        out.backward(dout.to(out))
        return out.detach().cpu(), x.grad.cpu(), sums

    def ours(with_logsumexp):
        core = AttentionCore(scores, kernels)
        if only is not None:
            core.implementations = (only,)
            only.takes = lambda given: True
        return lambda *given: core.forward(*given, with_logsumexp=with_logsumexp)

    documents = None
    if numbers is not None:
        documents = Documents.of(numbers).each(lambda one: one.to(device))
    *found, none = results(ours(False), fused.to(device), documents)
    *again, sums = results(ours(True), fused.to(device), documents)
    *expected, exact = results(
        lambda q, k, v, numbers: explicit_with_sums(q, k, v, scores, numbers),
        fused.double(),
        numbers,
    )
    assert none is None and all(map(torch.equal, found, again))
    for mine, true in zip(found, expected, strict=True):
        assert mine.dtype == fused.dtype
        torch.testing.assert_close(mine.double(), true, atol=tolerance, rtol=tolerance)
    if sums is None:
        assert device != "cpu" or isinstance(only, attention_core.PackedKernel)
        return
    assert not sums.requires_grad and sums.dtype == torch.promote_types(fused.dtype, torch.float32)
    tolerance = min(tolerance, 1e-4)  # scores are in float32
    torch.testing.assert_close(sums.double(), exact.detach(), atol=tolerance, rtol=tolerance)
