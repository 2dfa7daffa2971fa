"""Randomness is a function of logical coordinates, and good enough to drop with."""

import hashlib
import itertools

import pytest
import torch

from ptdmpi.base.box import Box
from ptdmpi.comm.communicator import OneRank
from ptdmpi.model import random
from ptdmpi.model.random import RandomStream, dropout, initial, mix
from ptdmpi.model.sequence.dropout import HiddenDropout
from ptdmpi.model.sequence.positions import ALL, Positions
from ptdmpi.model.stage import Stage
from ptdmpi.model.tensor_parallel import TensorAxis
from tests._configs import small
from tests._layers import whole_initial

SAMPLES = torch.tensor([3, 1000003, 17])


def stream(seed: int = 1, step: int = 2, *place: int) -> RandomStream:
    return RandomStream.of(seed, step, SAMPLES).at(*(place or (4, 0)))


def test_initial_weights_are_a_function_of_seed_and_name():
    shape = (64, 48)
    weights = whole_initial(1, "layers.0.mlp.up.weight", shape, 0.02)
    assert torch.equal(weights, whole_initial(1, "layers.0.mlp.up.weight", shape, 0.02))
    for seed, name in ((2, "layers.0.mlp.up.weight"), (1, "x")):
        other = whole_initial(seed, name, shape, 0.02)
        assert not torch.equal(weights, other)
        correlation = torch.corrcoef(torch.stack((weights.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 0.1
    assert weights.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean().item()) < 0.002
    assert not whole_initial(1, "b", (5,), "zeros").any()
    assert (whole_initial(1, "b", (5,), "ones") == 1).all()


@pytest.mark.parametrize("shape", [(1001, 37), (64, 48), (33, 16), (40, 3), (5, 3), (7, 1), (515,)])
@pytest.mark.parametrize("elements", [16, 100, 2**22])
def test_slabs_have_the_bits_of_the_whole(monkeypatch, shape, elements):
    """A slab has the bits of a tensor that is drawn at once, wherever it is cut, whatever is left
    out."""
    monkeypatch.setattr(random, "SLAB_ELEMENTS", elements)
    digest = hashlib.blake2b(b"7/some", digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    whole = torch.empty(shape).normal_(0.0, 0.3, generator=generator)
    assert torch.equal(whole_initial(7, "some", shape, 0.3), whole)
    rows = shape[0]
    last = [Box.whole(shape).rows(rows - 1, rows)]
    middle = [Box.whole(shape).rows(rows // 2, rows // 2 + 1)]
    for wanted in (last, middle, last + middle, []):
        found = list(initial(7, "some", shape, 0.3, wanted=wanted))
        for box, values in found:
            assert torch.equal(values, whole[box.index])
            assert any(box.overlap(one) for one in wanted)
        for one in wanted:
            assert any(box.overlap(one) == one for box, _ in found)


def test_mix_is_an_avalanche():
    """Each input bit flips each output bit for about half of the inputs, small numbers included."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    numbers = torch.randint(low, high, (2000,), generator=generator)
    shifts = torch.arange(64)
    for values in (numbers, torch.arange(2000)):
        for bit in range(64):
            flipped = mix(values) ^ mix(values ^ torch.tensor(1).bitwise_left_shift(bit))
            share = ((flipped[:, None] >> shifts) & 1).double().mean(0)
            assert (share - 0.5).abs().max() < 0.08, bit  # 7 standard deviations


def test_mix_is_a_bijection_on_what_was_tried():
    numbers = torch.cat((torch.arange(-50000, 50000), torch.arange(100000) << 40)).unique()
    assert mix(numbers).unique().numel() == numbers.numel()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rates_are_kept(rate):
    hidden = stream().hidden_mask((64, 3, 128), rate)
    attention = stream().attention_mask((3, 4, 64, 64), rate)
    for mask in (hidden, attention):
        error = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(mask.double().mean().item() - (1 - rate)) < 5 * error
        for dim in range(mask.dim()):  # no position, sample, channel or head is treated apart
            others = [d for d in range(mask.dim()) if d != dim]
            share = mask.double().mean(others)
            error = (rate * (1 - rate) * mask.shape[dim] / mask.numel()) ** 0.5
            assert (share - (1 - rate)).abs().max() < 6 * error


def test_parts_of_a_mask_are_those_of_the_whole():
    whole = stream().hidden_mask((16, 3, 8), 0.3)
    attention = stream().attention_mask((3, 8, 6, 6), 0.3)
    for size in (1, 2, 4, 8):
        rows, heads = 16 // size, 8 // size
        for rank in range(size):
            here = Positions().shared(rank, size)
            place = stream().at(9, positions=here)  # `at` starts from the folded key
            mine = place.hidden_mask((rows, 3, 8), 0.3)
            full = stream().at(9).hidden_mask((16, 3, 8), 0.3)
            assert torch.equal(mine, full[rank * rows : (rank + 1) * rows])
            part = stream().at(9, first_head=rank * heads).attention_mask((3, heads, 6, 6), 0.3)
            full = stream().at(9).attention_mask((3, 8, 6, 6), 0.3)
            assert torch.equal(part, full[:, rank * heads : (rank + 1) * heads])
    for sample in range(3):  # a sample's mask does not know its neighbours in the microbatch
        alone = RandomStream.of(1, 2, SAMPLES[sample : sample + 1]).at(4, 0)
        assert torch.equal(alone.hidden_mask((16, 1, 8), 0.3), whole[:, sample : sample + 1])
        mask = alone.attention_mask((1, 8, 6, 6), 0.3)
        assert torch.equal(mask, attention[sample : sample + 1])


def test_masks_are_independent():
    """By seed, step, layer and place; and along each dim of one mask."""
    shape, rate = (32, 3, 64), 0.5
    streams = [stream(), stream(2), stream(1, 3), stream(1, 2, 5, 0), stream(1, 2, 4, 1)]
    masks = [s.hidden_mask(shape, rate) for s in streams]
    attention = stream().attention_mask((3, 4, 32, 32), rate)
    pairs = list(itertools.combinations(masks, 2))
    for mask in (masks[0], attention):
        for dim in range(mask.dim()):
            size = mask.shape[dim]
            pairs += [(mask.narrow(dim, 0, size - 1), mask.narrow(dim, 1, size - 1))]
    pairs.append((attention, attention.transpose(-1, -2)))
    for a, b in pairs:
        agreement = (a == b).double().mean().item()
        assert abs(agreement - 0.5) < 5 * 0.5 / (a.numel() / 2) ** 0.5


def test_dropout_keeps_the_expectation():
    x = torch.full((64, 3, 128), 2.0)
    dropped = dropout(x, stream().hidden_mask(x.shape, 0.25), 0.25)
    assert dropped.unique().tolist() == pytest.approx([0.0, 2 / 0.75])
    assert dropped.mean().item() == pytest.approx(2.0, rel=0.02)


def test_every_dropout_of_a_model_has_a_mask_of_its_own():
    """Those of the embedding, and of attention and MLP in each layer."""
    config = small({"model.dropout": 0.5, "model.layers": 3})
    stage = Stage(config, 19, range(3), TensorAxis(OneRank()))
    dropouts = [module for module in stage.modules() if isinstance(module, HiddenDropout)]
    assert len(dropouts) == 1 + 2 * 3
    masks = [module(torch.ones(8, 3, 16), stream(), ALL) == 0 for module in dropouts]
    assert all(mask.any() for mask in masks)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(masks, 2))
