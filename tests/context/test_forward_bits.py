"""Attention of a context rank that has all keys (`"all_gather"`): its forward has the bits of one
rank if chunks are multiples of 256 positions."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.comm.communicator import OneRank
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels import attention as attention_core
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import BlockedAttention, Scores
from ptdmpi.model.kernels.choice import AttentionByLibrary, AttentionByProducts, HostChoice
from ptdmpi.model.operators import Build, Context, SelfAttention
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.positions import Positions
from ptdmpi.model.tensor_parallel import TensorAxis
from tests._configs import small

SIZE = 16
WAYS = {
    "library": AttentionByLibrary(),
    "library at once": AttentionByLibrary(1024),
    "products": AttentionByProducts(),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def core_of(way: str, causal: bool) -> AttentionCore:
    return AttentionCore(Scores(SIZE**-0.5, causal), Kernels(HostChoice(WAYS[way])))


def inputs(length: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries of four heads, and keys and values of `key_heads`."""
    generator = torch.Generator().manual_seed(1)
    heads = (4, key_heads, key_heads)
    return [torch.randn(1, n, length, SIZE, generator=generator).to(dtype) for n in heads]


def has_equal_bits(core: AttentionCore, c: int, operands: list[Tensor]) -> bool:
    q, k, v = operands
    whole = core(q, k, v)
    ranks = [Positions(rank, c) for rank in range(c)]
    return all(
        torch.equal(core(here.of(q, 2), k, v, positions=here), here.of(whole, 2)) for here in ranks
    )


@pytest.mark.cases(6)
@pytest.mark.parametrize("c", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_chunks_of_256_have_the_bits_of_one_rank(way, key_heads, dtype, c):
    core = core_of(way, causal=True)
    assert has_equal_bits(core, c, inputs(2 * c * 256, key_heads, dtype))


@pytest.mark.parametrize("c", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_so_has_bidirectional_attention(key_heads, dtype, c):
    core = core_of("library", causal=False)
    assert has_equal_bits(core, c, inputs(2 * c * 256, key_heads, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [200, 512, 1000])
def test_a_rank_with_a_key_head_for_each_query_head_has_the_bits_of_grouped_queries(length, dtype):
    """As four ranks of "ulysses" have them, if the model has two key heads."""
    model = small({"model.kv_heads": 2, "model.heads": 4}).model
    alone = ContextAxis(OneRank())
    attention = SelfAttention(Build(model, TensorAxis(OneRank()), 0, False, alone))
    attention.take(Kernels(HostChoice()))
    q, k, v = inputs(length, 2, dtype)
    whole = attention(q, k, v, Context()).unflatten(2, (4, SIZE))
    for head in range(4):
        own, key = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        assert torch.equal(attention(q[:, own], k[:, key], v[:, key], Context()), whole[:, :, head])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_computes_grouped_queries_in_one_call(dtype):
    q, k, v = inputs(1024, 2, dtype)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with patch.object(BlockedAttention, "forward", side_effect=AssertionError("in blocks")):
        assert torch.equal(core_of("library", causal=True)(q, k, v), expected)


@pytest.mark.parametrize(
    ("key_heads", "positions", "block"), [(4, 1, 128), (4, 2, 128), (2, 2, 256)]
)
def test_blocks_are_wide_only_where_one_rank_makes_one_call(key_heads, positions, block):
    q, k, v = inputs(1024, key_heads, torch.float32)
    here = Positions(0, positions)
    used = []
    usual = BlockedAttention.apply
    with patch.object(
        attention_core.BlockedAttention,
        "apply",
        lambda q, k, v, work: used.append(work.block) or usual(q, k, v, work),
    ):
        core_of("library", causal=True)(here.of(q, 2), k, v, positions=here)
    assert used == [block]
