"""Attention in blocks of queries is attention."""

import math

import pytest
import torch

from ptdmpi.model import kernels


def explicit(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("precision, tolerance", [("float64", 1e-12), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("seq_length", [1, 5, 128, 129, 256, 300])
def test_causal_attention_matches_explicit(seq_length, kv_heads, precision, tolerance):
    generator = torch.Generator().manual_seed(seq_length)
    heads, size = 4, 8
    # cut out of one tensor, sequence first, as a layer does
    fused = torch.randn(seq_length, 2, (heads + 2 * kv_heads) * size, generator=generator)
    fused = fused.to(getattr(torch, precision))
    dout = torch.randn(2, heads, seq_length, size, generator=generator).to(fused.dtype)

    def results(attention, x):
        x = x.detach().requires_grad_()
        parts = x.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part in parts)
        out = attention(q, k, v)
        out.backward(dout.to(out.dtype))
        return out.detach(), x.grad

    found = results(kernels.causal_attention, fused)
    expected = results(explicit, fused.double())
    for mine, true in zip(found, expected, strict=True):
        assert mine.dtype == fused.dtype
        torch.testing.assert_close(mine.double(), true, atol=tolerance, rtol=tolerance)
