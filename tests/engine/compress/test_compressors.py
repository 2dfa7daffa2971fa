"""What each compressor promises: its property, its size to the byte, and the same code for a unit
whatever stands beside it."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.comm.communicator import OneRank
from ptdmpi.engine.compress.compressor import Draws, unit_number
from ptdmpi.engine.compress.low_rank import LowRank, orthonormal
from ptdmpi.engine.compress.quantise import Qsgd, Rounded, Sign
from ptdmpi.engine.compress.sparse import RandomK, TopK
from ptdmpi.model.low_bit.packing import pack, packed_bytes, unpack

UNBIASED = {
    "random_k": RandomK(0.25, unbiased=True),
    "qsgd-1": Qsgd(1, unbiased=True),
    "qsgd-4": Qsgd(4, unbiased=True),
    "qsgd-127": Qsgd(127, unbiased=True),
}
CONTRACTIVE = {
    "top_k": TopK(0.25),
    "random_k": RandomK(0.25, unbiased=False),
    "qsgd-1": Qsgd(1, unbiased=False),
    "qsgd-4": Qsgd(4, unbiased=False),
    "sign": Sign(),
    "int8": Rounded(8, 64),
    "int4": Rounded(4, 64),
}
FEW = settings(max_examples=30)
ALL = CONTRACTIVE | {f"unbiased {name}": one for name, one in UNBIASED.items()}


def draws(n: int, key: int = 1, source: int = 0) -> Draws:
    return Draws(torch.tensor([unit_number("w", 0, run) for run in range(n)]), key, source)


def compressed(compressor, x, some):
    code = compressor.encode(x, some)
    return compressor.decode(code, some, x.shape[1], x.dtype)


@st.composite
def rows(draw):
    """[n, length] of magnitudes that differ, with zeros and equal elements among them."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 64)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    x = torch.randn(shape, generator=generator, dtype=dtype)
    x *= 10.0 ** draw(st.integers(-12, 12))
    if draw(st.booleans()):
        x = x * (torch.rand(shape, generator=generator) < 0.5)
    if draw(st.booleans()):
        x = x.sign() * draw(st.floats(0.5, 2.0))
    return x


@given(st.lists(st.integers(0, 2**13 - 1), max_size=40), st.integers(13, 17))
def test_packed_numbers_come_back(numbers, bits):
    for b in (bits, *([1, 3, 8] if all(n < 2 for n in numbers) else [])):
        values = torch.tensor(numbers, dtype=torch.int64)
        code = pack(values, b)
        assert code.dtype == torch.uint8
        assert len(code) == packed_bytes(len(numbers), b) == math.ceil(len(numbers) * b / 8)
        assert torch.equal(unpack(code, len(numbers), b), values)


@given(st.integers(1, 8), st.data())
def test_all_numbers_of_few_bits_come_back(bits, data):
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=20))
    values = torch.tensor(numbers, dtype=torch.int64)
    assert torch.equal(unpack(pack(values, bits), len(numbers), bits), values)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(x=rows(), key=st.integers(0, 1000))
def test_a_code_has_the_foretold_size(name, x, key):
    some = draws(len(x), key)
    code = ALL[name].encode(x, some)
    assert code.dtype == torch.uint8 and code.is_contiguous()
    assert len(code) == ALL[name].code_bytes(some, x.shape[1], x.dtype)
    assert torch.isfinite(compressed(ALL[name], x, some)).all()


@pytest.mark.parametrize("name", ALL)
@FEW
@given(x=rows(), key=st.integers(0, 1000))
def test_a_unit_is_compressed_for_itself(name, x, key):
    """Alone, between others, in another order: the same bits. Of another data rank others."""
    some = draws(len(x), key)
    together = compressed(ALL[name], x, some)
    for row in range(len(x)):
        alone = compressed(ALL[name], x[row : row + 1], some.rows(slice(row, row + 1)))
        assert torch.equal(alone[0], together[row])
    back = torch.arange(len(x) - 1, -1, -1)
    assert torch.equal(compressed(ALL[name], x[back], some.rows(back)), together[back])


@pytest.mark.parametrize("name", ["top_k", "sign", "int8", "int4"])
@FEW
@given(x=rows())
def test_what_was_compressed_is_compressed_to_itself(name, x):
    once = compressed(ALL[name], x, draws(len(x)))
    twice = compressed(ALL[name], once, draws(len(x)))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0.0)


@FEW
@given(x=rows())
def test_ratio_one_is_the_identity(x):
    for one in (TopK(1.0), RandomK(1.0, unbiased=True), RandomK(1.0, unbiased=False)):
        assert torch.equal(compressed(one, x, draws(len(x))), x)
        assert one.code_bytes(draws(len(x)), x.shape[1], x.dtype) == -(-x.nbytes // 8) * 8


@pytest.mark.parametrize("name", ["sign", "int8", "int4"])
@FEW
@given(x=rows())
def test_contraction_holds_for_every_row(name, x):
    left = (compressed(ALL[name], x, draws(len(x))) - x).double().square().sum(dim=1)
    bound = (1 - CONTRACTIVE[name].delta(x.shape[1])) * x.double().square().sum(dim=1)
    # float32 itself takes 1e-7 of the square of each element
    assert (left <= bound * (1 + 1e-5) + 1e-12 * x.double().square().sum(dim=1)).all()


@FEW
@given(x=rows())
def test_top_k_leaves_no_more_than_any_other_choice(x):
    """Every row keeps floor(ratio d) elements at least, and the greatest: delta = k / d."""
    some = draws(len(x))
    counts = CONTRACTIVE["top_k"].counts(some, x.shape[1])
    found = compressed(CONTRACTIVE["top_k"], x, some)
    for row, value, count in zip(x, found, counts, strict=True):
        best = row.abs().sort(descending=True).values[: int(count)].double().square().sum()
        assert value.double().square().sum().item() == pytest.approx(best.item(), rel=1e-12)
        assert torch.equal(value[value != 0], row[value != 0])
        assert abs(int(count) - 0.25 * x.shape[1]) < 1


@FEW
@given(x=rows(), key=st.integers(0, 100))
def test_of_equal_magnitudes_the_first_are_kept(x, key):
    ones = torch.ones_like(x)
    found = compressed(TopK(0.5), ones, draws(len(x), key))
    assert (found.diff(dim=1) <= 0).all()


MANY = 20_000


def many(compressor, row):
    """C of one row, drawn so often: [MANY, length]."""
    return compressed(compressor, row.expand(MANY, -1).contiguous(), draws(MANY))


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_the_mean_is_right_and_the_variance_bounded(name, length):
    """5 standard errors about the mean of each element; of a fair coin one in 10^6 is outside."""
    one = UNBIASED[name]
    row = torch.randn(length, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = many(one, row)
    error = found.std(dim=0) / math.sqrt(MANY)
    assert ((found.mean(dim=0) - row).abs() <= 5 * error + 1e-6).all()
    variance = (found - row).square().sum(dim=1).mean()
    assert variance <= 1.05 * one.omega(length) * row.square().sum()
    if isinstance(one, RandomK):  # it has this variance, and no less
        assert variance >= 0.95 * one.omega(length) * row.square().sum()


@pytest.mark.parametrize("name", ["top_k", "random_k", "qsgd-1", "qsgd-4"])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_contraction_holds_in_expectation(name, length):
    one = CONTRACTIVE[name]
    row = torch.randn(length, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    left = (many(one, row) - row).square().sum(dim=1).mean()
    assert left <= 1.02 * (1 - one.delta(length)) * row.square().sum()


def test_the_mean_is_right_by_enumerating_every_rounding():
    """QSGD of three numbers with s = 2: each goes up with the probability that is left."""
    row = torch.tensor([0.3, -1.2, 0.5], dtype=torch.float64)
    share = row.abs() / row.norm() * 2
    low, up = share.floor(), share - share.floor()
    mean = torch.zeros_like(row)
    for choice in itertools.product((0, 1), repeat=3):
        taken = torch.tensor(choice)
        chance = torch.where(taken == 1, up, 1 - up).prod()
        one = Qsgd(2, unbiased=True)
        codes = ((low + taken) * row.sign() + 2).to(torch.int64)
        mean += chance * one.values(codes[None], row.norm().view(1, 1))[0]
    torch.testing.assert_close(mean, row, rtol=1e-14, atol=0.0)


@FEW
@given(x=rows())
def test_what_is_drawn_depends_on_step_and_rank(x):
    if x.shape[1] < 32:
        return
    some = draws(1, key=1)
    bits = some.hashes(32)
    assert not torch.equal(draws(1, key=2).hashes(32), bits)
    assert not torch.equal(some.of(1).hashes(32), bits)
    assert torch.equal(some.of(1).shared(), some.shared())
    assert len(set(bits.view(-1).tolist())) == 32


@given(st.integers(1, 3), st.integers(4, 12), st.integers(4, 12), st.integers(0, 99))
def test_low_rank_is_a_projection(rank, lines, length, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((2, lines, length), generator=generator, dtype=torch.float64)
    low = LowRank(rank)
    second = low.start(torch.zeros((2, rank, length), dtype=torch.float64), draws(2))
    own, total, second = low.summed(x, second, OneRank())
    assert torch.equal(own, total)
    assert (x - own).square().sum() <= x.square().sum()
    # what has that rank already, and is started with its own factor, stays
    again, _, _ = low.summed(own, second, OneRank())
    torch.testing.assert_close(again, own, rtol=1e-10, atol=1e-12)


def test_low_rank_finds_the_best_one_when_asked_again():
    """Warm-started on a matrix that stays: as good as the singular vectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 8, 12), generator=generator, dtype=torch.float64)
    low = LowRank(2)
    second = low.start(torch.zeros((1, 2, 12), dtype=torch.float64), draws(1))
    for _ in range(400):
        own, _, second = low.summed(x, second, OneRank())
    values = torch.linalg.svdvals(x[0])
    assert (x - own).square().sum().item() == pytest.approx(values[2:].square().sum().item())
    assert (x - own).square().sum() <= (1 - 2 / 8) * x.square().sum()


def test_columns_that_depend_on_others_are_left_out():
    columns = torch.tensor([[[1.0, 2.0, 0.0], [1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]])
    found = orthonormal(columns)
    assert torch.equal(found[0, :, 1], torch.zeros(3))
    product = found[0].T @ found[0]
    torch.testing.assert_close(product, torch.diag(torch.tensor([1.0, 0.0, 1.0])))
