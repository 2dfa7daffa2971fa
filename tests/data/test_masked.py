"""Masked samples: their texts and masked tokens, which depend on seed and number only."""

import re
from collections import Counter

import numpy as np
import pytest

from ptdmpi.data.batches import TrainBatches, ValidationBatches
from ptdmpi.data.documents import FormedBatches, Windows
from ptdmpi.data.masked import LONGEST_WORD, MaskedSamples, predictions
from ptdmpi.data.order import Part, SampleOrder
from tests._configs import small
from tests._texts import END, byte_shards, text

S = 64
BEGIN = 257
SEPARATOR = 258
MASK = 259
LENGTHS = (500, 3, 130, 40, 20, 900, 8, 1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    documents = [text(n, seed) for seed, n in enumerate(LENGTHS)]
    folder = tmp_path_factory.mktemp("masked") / "shards"
    return byte_shards(folder, [[*"xxxxxxxx", *documents, ""], [*documents[::-1], "y"]])


def form(dataset, **changes) -> MaskedSamples:
    changes = {"model.kind": "bert", "model.seq_length": S} | changes
    config = small(changes)
    return MaskedSamples(config.model, config.data, dataset, config.run.seed)


def samples_of(dataset, made: MaskedSamples, numbers=range(1200)):
    """(window, documents, sample) of some global numbers, epoch after epoch."""
    length = S - 3
    count = dataset.samples(S - 3)
    windows = Windows([dataset], lambda n: (np.zeros_like(n), n % count), length)
    everything = windows.documents(np.arange(count))[:, :-1]
    tokens = dataset.read(np.arange(count), length)[:, :-1]
    for number in numbers:
        place = number % count
        yield (
            tokens[place],
            everything[place],
            made.sample(tokens[place], everything[place], number),
        )


def restored(sample) -> np.ndarray:
    ids = sample.ids.copy()
    ids[sample.masked] = sample.labels
    return ids


def test_a_sample_is_consecutive_text_of_one_document(dataset):
    orders = Counter()
    seen = set()
    for window, documents, sample in samples_of(dataset, form(dataset)):
        ids = restored(sample)
        ends = np.flatnonzero(ids == SEPARATOR)
        assert ids[0] == BEGIN and ends[-1] == len(ids) - 1 and len(ids) <= S
        parts = [ids[1 : ends[0]]]
        assert len(ends) == 1 + (sample.order >= 0)
        if sample.order >= 0:
            parts.append(ids[ends[0] + 1 : -1])
            assert all(len(part) for part in parts)
        expected_types = np.repeat([0, 1], [ends[0] + 1, len(ids) - ends[0] - 1])
        assert (sample.types == expected_types).all()
        whole = np.concatenate(parts[::-1] if sample.order == 1 else parts)
        texts = [window[documents == n] for n in np.unique(documents)]
        texts = [text[:-1] if text[-1] == END else text for text in texts]
        assert any(len(text) == len(whole) and (text == whole).all() for text in texts)
        orders[sample.order] += 1
        seen.add(bytes(whole.astype(np.uint8)))
    assert orders[0] == pytest.approx(orders[1], rel=0.15)
    assert orders[-1]  # documents of one word
    # nearly every document of every window by now, and each in the long run
    known = {
        bytes(part[part != END].astype(np.uint8))
        for window, documents, _ in samples_of(
            dataset, form(dataset), range(dataset.samples(S - 3))
        )
        for part in (window[documents == n] for n in np.unique(documents))
    }
    known -= {b""}
    assert seen <= known and len(seen) > 0.8 * len(known)


def test_whole_words_are_hidden_and_few_of_them(dataset):
    kinds = Counter()
    share = 0
    tokens = 0
    for _, _, sample in samples_of(dataset, form(dataset)):
        ids = restored(sample)
        hidden = np.zeros(len(ids), dtype=bool)
        hidden[sample.masked] = True
        assert hidden.sum() == len(sample.masked) and (np.diff(sample.masked) > 0).all()
        assert not hidden[(ids == BEGIN) | (ids == SEPARATOR)].any()
        length = int((ids < 256).sum())
        budget = predictions(0.15, length)
        assert 0 < len(sample.masked) <= budget
        share = share + len(sample.masked)
        tokens = tokens + budget
        written = "".join(chr(n) if n < 256 else "\n" for n in ids)
        limit = min(LONGEST_WORD, budget)
        for match in re.finditer(r"[A-Za-z0-9_\x80-\xff]+", written):
            inside = hidden[slice(*match.span())]
            assert len(inside) > limit or inside.all() or not inside.any()
        shown = sample.ids[sample.masked]
        kinds.update(np.where(shown == MASK, "mask", np.where(shown == sample.labels, "same", "")))
    assert share > 0.9 * tokens
    total = sum(kinds.values())
    assert kinds["mask"] / total == pytest.approx(0.8, abs=0.02)
    assert kinds["same"] / total == pytest.approx(0.1, abs=0.02)


def test_grams_are_longer_where_more_words_may_go_together(dataset):
    """Neighbouring hidden tokens, where each token is a word of its own."""
    together = []
    for most in (1, 3):
        made = form(dataset, **{"data.mask_ngram": most, "data.whole_words": False})
        few = samples_of(dataset, made, range(400))
        runs = [np.diff(sample.masked) == 1 for _, _, sample in few]
        together.append(np.concatenate(runs).mean())
    assert together[0] < 0.2 and together[1] > 1.5 * together[0]


def test_only_seed_and_number_decide(dataset):
    made = form(dataset)
    again = form(dataset)
    other = form(dataset, **{"run.seed": 5})
    count = dataset.samples(S - 3)
    numbers = [3, 7, 3 + count, 7 + 5 * count]
    first, second, third = (
        [sample for *_, sample in samples_of(dataset, maker, numbers)]
        for maker in (made, again, other)
    )
    for left, right in zip(first, second, strict=True):
        for name in ("ids", "types", "masked", "labels"):
            assert np.array_equal(getattr(left, name), getattr(right, name))
    assert any(not np.array_equal(a.ids, b.ids) for a, b in zip(first, third, strict=True))
    assert not np.array_equal(first[0].ids, first[2].ids)  # another epoch hides other words


@pytest.mark.parametrize(("size", "micro_size"), [(2, 1), (1, 4), (4, 2)])
def test_microbatches_do_not_depend_on_the_layout(dataset, size, micro_size):
    made = form(dataset)
    length = S - 3

    def batches(rank: int, ranks: int, b: int):
        order = SampleOrder([Part(dataset.samples(length), "1")], 7)
        raw = TrainBatches(
            [dataset], order, length, global_size=8, micro_size=b, data_rank=rank, data_size=ranks
        )
        windows = Windows([dataset], order.locate, length)
        return FormedBatches(raw, lambda batch: made(windows, batch)).step(3)

    alone = batches(0, 1, 1)
    dealt = [batch for rank in range(size) for batch in batches(rank, size, micro_size)]
    for name in ("samples", "inputs", "labels", "weights", "masked", "types", "order"):
        mine, theirs = ([getattr(batch, name) for batch in of] for of in (dealt, alone))
        assert np.array_equal(np.concatenate(mine), np.concatenate(theirs)), name
    padded = [batch.documents for batch in alone]
    for batch, padding in zip(alone, padded, strict=True):
        lengths = np.array([np.flatnonzero(row == SEPARATOR)[-1] + 1 for row in batch.inputs])
        if padding is None:
            assert (lengths == S).all()
        else:
            assert (padding == (np.arange(S) >= lengths[:, None])).all()
            assert (batch.inputs[padding == 1] == END).all()
    assert any(padding is not None for padding in padded)


def test_rows_that_fill_up_a_validation_do_not_count(dataset):
    made = form(dataset)
    length = S - 3
    batches = ValidationBatches(
        dataset, length, micro_size=4, data_rank=0, data_size=1, max_samples=6
    )
    windows = Windows([dataset], lambda n: (np.zeros_like(n), np.minimum(n, 5)), length)
    first, last = (made(windows, microbatch) for microbatch in batches.microbatches())
    assert (first.weights.sum(1) > 0).all()
    assert (last.weights[:2].sum(1) > 0).all() and not last.weights[2:].any()
    assert (last.order[2:] == -1).all()


def test_windows_without_text(dataset):
    made = form(dataset)
    only_ends = np.full(S - 3, END)
    sample = made.sample(only_ends, np.arange(S - 3), 1)
    assert sample.ids.tolist() == [BEGIN, SEPARATOR] and not len(sample.masked)
    assert sample.order == -1 and sample.types.tolist() == [0, 0]


def test_one_segment_where_no_order_is_asked_for(dataset):
    changes = {"model.sentence_order": False, "model.token_types": 0}
    made = form(dataset, **changes)
    model = small({"model.kind": "bert", "model.seq_length": S} | changes).model
    assert model.text_length == S - 2
    for _, _, sample in samples_of(dataset, made, range(50)):
        assert sample.order == -1 and (sample.ids == SEPARATOR).sum() == 1


def test_one_type_for_both_segments(dataset):
    """A model of one type tells segments apart by the separator alone; the rest is the same."""
    single = form(dataset, **{"model.token_types": 1})
    two = form(dataset)
    for (*_, a), (*_, b) in zip(
        samples_of(dataset, single, range(50)), samples_of(dataset, two, range(50)), strict=True
    ):
        assert (a.types == 0).all() and (b.types.max() == 1) == (b.order >= 0)
        assert (a.ids == b.ids).all() and a.order == b.order
