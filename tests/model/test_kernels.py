"""Attention in blocks of queries, and in documents, is attention."""

import math
from unittest import mock

import pytest
import torch

from ptdmpi.model import kernels
from ptdmpi.model.documents import Documents

HALF = [("float64", 1e-12), ("bfloat16", 2e-2)]


def explicit(q, k, v, causal=True, numbers=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    if numbers is not None:
        hidden = hidden | (numbers[:, None, :, None] != numbers[:, None, None, :])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def random_numbers(rows: int, length: int) -> torch.Tensor:
    """Document numbers [rows, length]; the first row is one document."""
    generator = torch.Generator().manual_seed(length)
    ends = torch.rand(rows, length, generator=generator) < 0.05
    ends[0] = False
    return ends.cumsum(1)


@pytest.mark.parametrize("precision, tolerance", HALF)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_length", [1, 5, 128, 129, 300])
def test_attention_matches_explicit(seq_length, causal, kv_heads, precision, tolerance):
    check(seq_length, kv_heads, precision, tolerance, causal, None)


@pytest.mark.parametrize("precision, tolerance", HALF)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_length", [1, 40, 300])
def test_attention_of_documents_matches_explicit(
    seq_length, causal, kv_heads, precision, tolerance
):
    numbers = random_numbers(2, seq_length)
    check(seq_length, kv_heads, precision, tolerance, causal, numbers)


def packed(q, k, v, *places, window_size, enable_gqa):
    """Attention of sequences laid end to end, [tokens, heads, head size], one by one."""
    offsets, offsets_k, longest, longest_k = places
    assert torch.equal(offsets, offsets_k) and offsets.dtype == torch.int32
    assert longest == longest_k == offsets.diff().max() and offsets[0] == 0
    assert offsets[-1] == len(q) and enable_gqa == (q.shape[1] != k.shape[1])
    parts = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        own = (part[None, begin:end].transpose(1, 2) for part in (q, k, v))
        parts.append(explicit(*own, causal=window_size == (-1, 0))[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_the_way_of_devices_matches_explicit(half, causal, kv_heads):
    """What stands around torch's packed kernel, and the mask where that cannot be taken."""
    kinds = (torch.float64,) if half else ()
    with (
        mock.patch.object(kernels, "HALF_TYPES", kinds),
        mock.patch.object(kernels, "_packed_attention", lambda: packed),
        mock.patch.object(kernels, "attention", kernels._attention_of_documents),
    ):
        check(50, kv_heads, "float64", 1e-12, causal, random_numbers(2, 50))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_kernel_of_a_device_matches_explicit(causal, kv_heads):
    assert kernels._packed_attention() is not None
    check(300, kv_heads, "bfloat16", 2e-2, causal, random_numbers(2, 300), "cuda")


def test_documents_know_their_places():
    numbers = torch.tensor([[7, 7, 7, 9, 9], [1, 2, 2, 2, 2]])
    documents = Documents.of(numbers)
    assert documents.positions.t().tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert documents.pieces == ((0, 0, 3), (0, 3, 5), (1, 0, 1), (1, 1, 5))
    assert documents.offsets.tolist() == [0, 3, 5, 6, 10] and documents.longest == 4
    assert torch.equal(documents.others()[:, 0], numbers[:, :, None] != numbers[:, None, :])


def check(seq_length, kv_heads, precision, tolerance, causal, numbers, device="cpu"):
    """Output and gradients of the project's attention are those of the explicit one."""
    generator = torch.Generator().manual_seed(seq_length)
    heads, size = 4, 8
    # cut out of one tensor, sequence first, as a layer does
    fused = torch.randn(seq_length, 2, (heads + 2 * kv_heads) * size, generator=generator)
    fused = fused.to(getattr(torch, precision))
    dout = torch.randn(2, heads, seq_length, size, generator=generator).to(fused.dtype)

    def results(attention, x, documents):
        x = x.detach().requires_grad_()
        parts = x.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part in parts)
        out = attention(q, k, v, causal, documents)
        out.backward(dout.to(out))
        return out.detach().cpu(), x.grad.cpu()

    documents = None if numbers is None else Documents.of(numbers, device)
    found = results(kernels.attention, fused.to(device), documents)
    expected = results(explicit, fused.double(), numbers)
    for mine, true in zip(found, expected, strict=True):
        assert mine.dtype == fused.dtype
        torch.testing.assert_close(mine.double(), true, atol=tolerance, rtol=tolerance)
