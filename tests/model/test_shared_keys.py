"""Grouped queries on devices: kernels that share keys, and copies for those that do not."""

from unittest import mock

import pytest
import torch

from ptdmpi.config import Layout
from ptdmpi.model.kernels import attention as attention_core
from ptdmpi.model.kernels import host
from ptdmpi.model.kernels.attention import AttentionCore
from ptdmpi.model.kernels.blocks import Scores
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.machine.cluster import TRAINER
from tests._configs import small
from tests._items import layer_items

TRIED = [
    ("bfloat16", True, 16, True),
    ("bfloat16", False, 16, False),  # a GPU of before Ampere
    ("float32", True, 16, False),
]


@pytest.mark.parametrize(("precision", "flash", "size", "shared"), TRIED)
def test_keys_are_copied_for_kernels_that_share_none(precision, flash, size, shared):
    """Or PyTorch takes the one kernel that does, which writes all scores down and keeps them."""
    dtype = getattr(torch, precision)
    q, k, v = (torch.empty(1, n, 8, size, dtype=dtype, device="meta") for n in (4, 2, 2))
    causal, asked = Scores(1.0), mock.Mock(side_effect=lambda q, *rest, **named: q)
    with (
        mock.patch.object(host, "has_flash", lambda device_type: flash),
        mock.patch.object(attention_core.F, "scaled_dot_product_attention", asked),
    ):
        AttentionCore(causal)(q, k, v)
        (call,) = asked.call_args_list
        assert [one.shape[1] for one in call.args] == [4, *[2 if shared else 4] * 2]
        assert call.kwargs["enable_gqa"] == shared and call.kwargs["is_causal"]
        asked.reset_mock()
        seen = torch.empty(1, 1, 3, 8, dtype=torch.bool, device="meta")
        AttentionCore(causal).under_mask(q[:, :, :3], k, v, seen)
        (call,) = asked.call_args_list  # three queries of two heads as six of one
        assert [tuple(one.shape) for one in call.args] == [(1, 2, n, size) for n in (6, 8, 8)]
        assert call.kwargs["attn_mask"].shape == (1, 1, 6, 8) and len(call.kwargs) == 2


@pytest.mark.parametrize(("precision", "flash", "size", "shared"), TRIED)
def test_a_windows_kernel_is_one_that_there_is(precision, flash, size, shared):
    """FlashAttention of packed sequences is called by its name: nothing steps in for it."""
    dtype, window = getattr(torch, precision), Scores(1.0, window=3)
    packed = mock.Mock(side_effect=lambda q, *rest, **named: q)
    with (
        mock.patch.object(host, "has_flash", lambda device_type: flash),
        mock.patch.object(attention_core, "_packed_attention", lambda: packed),
    ):
        for width in (size, size + 2, 256, 264):
            packed.reset_mock()
            q, k, v = (torch.empty(1, n, 8, width, dtype=dtype, device="meta") for n in (4, 2, 2))
            assert AttentionCore(window)(q, k, v).shape == q.shape
            assert packed.called == (shared and width in (size, 256)), width


def test_copies_of_keys_and_values_are_counted():
    """On a device, of wide types, and not under a cap, which is computed here."""

    def copied(precision: str, repeats: bool, **keys: object) -> int:
        changes = {"model.kind": "llama", "model.kv_heads": 2, **keys}
        software = TRAINER.model_copy(update={"repeats_keys": repeats})
        sizes = Sizes(small(changes).model, Layout(1, 1, 1, micro_size=2), precision, software)
        items = {item.name: item.bytes for item in layer_items(sizes, "none")}
        return items.get("attention.key_value.copy", 0)

    model = small({"model.kind": "llama", "model.kv_heads": 2}).model
    expected = 2 * 2 * model.seq_length * model.heads * model.head_size * 4
    assert copied("fp32", True) == expected
    assert copied("fp32", False) == copied("bf16", True) == 0
    assert copied("fp32", True, **{"model.attention_softcap": 5.0}) == 0
    assert copied("fp32", True, **{"model.kv_heads": model.heads}) == 0
