"""Microbatches: the same samples in every layout, padded validation, the prefetching thread."""

import threading
import traceback

import numpy as np
import pytest

from ptdmpi.config import InputError
from ptdmpi.data.batches import Prefetcher, TrainBatches, ValidationBatches
from ptdmpi.data.order import Part, SampleOrder
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset

SEQ_LENGTH = 8


def make_dataset(directory, tokens, vocab_size=50000):
    directory.mkdir()
    with ShardWriter(
        directory / "shard.h5", "none", "0" * 64, vocab_size=vocab_size, eod_id=0
    ) as writer:
        writer.write(np.asarray(tokens), np.array([len(tokens)]))
    return Dataset(directory)


@pytest.fixture
def datasets(tmp_path):
    return [
        make_dataset(tmp_path / "a", np.arange(0, 801)),  # 100 samples
        make_dataset(tmp_path / "b", np.arange(10000, 10000 + 25 * 8 + 1)),  # 25 samples
    ]


def make_batches(datasets, rank, size, global_size=12, micro_size=1):
    parts = [
        Part(dataset.samples(SEQ_LENGTH), weight)
        for dataset, weight in zip(datasets, "31"[: len(datasets)], strict=True)
    ]
    order = SampleOrder(parts, seed=7)
    return TrainBatches(
        datasets,
        order,
        SEQ_LENGTH,
        global_size=global_size,
        micro_size=micro_size,
        data_rank=rank,
        data_size=size,
    )


def step_of_all_ranks(datasets, size, micro_size, k):
    ranks = [make_batches(datasets, rank, size, micro_size=micro_size) for rank in range(size)]
    batches = [batch for rank in ranks for batch in rank.step(k)]
    assert all(
        batch.inputs.shape == batch.labels.shape == (micro_size, SEQ_LENGTH) for batch in batches
    )
    names = ("samples", "inputs", "labels")
    return [np.concatenate([getattr(batch, name) for batch in batches]) for name in names]


@pytest.mark.parametrize(("size", "micro_size"), [(1, 3), (2, 1), (2, 3), (4, 1), (4, 3), (3, 2)])
@pytest.mark.parametrize("k", [0, 1, 5000])
def test_step_does_not_depend_on_the_layout(datasets, size, micro_size, k):
    expected = step_of_all_ranks(datasets, 1, 1, k)
    assert (expected[0] == np.arange(12 * k, 12 * k + 12)).all()
    for mine, reference in zip(
        step_of_all_ranks(datasets, size, micro_size, k), expected, strict=True
    ):
        assert (mine == reference).all()


def test_rows_are_the_samples_of_the_order(datasets):
    batches = make_batches(datasets, 0, 1)
    microbatches = batches.step(2)
    rows = np.concatenate([batch.inputs for batch in microbatches])
    order = SampleOrder([Part(100, "3"), Part(25, "1")], seed=7)
    where, sample = order.locate(np.arange(24, 36))
    assert (rows[:, 0] == where * 10000 + sample * SEQ_LENGTH).all()
    assert (np.concatenate([batch.labels for batch in microbatches]) == rows + 1).all()
    assert rows.dtype == np.int64 and microbatches[0].weights is None


def test_an_epoch_has_no_repeats(datasets):
    batches = make_batches(datasets[:1], 0, 1, global_size=10)
    firsts = [batch.inputs[0, 0] for k in range(10) for batch in batches.step(k)]
    assert sorted(firsts) == list(range(0, 800, SEQ_LENGTH))


def test_indivisible_batch_is_refused(datasets):
    with pytest.raises(ValueError, match="global batch 12"):
        make_batches(datasets, 0, 5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_size", [1, 4])
@pytest.mark.parametrize("max_samples", [None, 7, 1000])
def test_validation_covers_each_sample_once(datasets, size, micro_size, max_samples):
    expected = min(25, max_samples or 25)
    seen = []
    counts = set()
    for rank in range(size):
        batches = ValidationBatches(
            datasets[1],
            SEQ_LENGTH,
            micro_size=micro_size,
            data_rank=rank,
            data_size=size,
            max_samples=max_samples,
        )
        microbatches = list(batches.microbatches())
        counts.add((len(microbatches), batches.count))
        for batch in microbatches:
            mask = np.ones(batch.inputs.shape) if batch.weights is None else batch.weights
            assert (mask.min(axis=1) == mask.max(axis=1)).all()
            seen += batch.inputs[mask[:, 0] > 0, 0].tolist()
            assert batch.inputs.shape == (micro_size, SEQ_LENGTH)
    assert seen == [10000 + SEQ_LENGTH * sample for sample in range(expected)]
    assert len(counts) == 1 and len(set(counts.pop())) == 1


def test_prefetcher_gives_the_steps_in_order_and_ends(datasets):
    batches = make_batches(datasets, 0, 1)
    prefetcher = Prefetcher(batches, 3, 9)
    firsts = [step[0].samples[0] for step in prefetcher]
    assert firsts == [12 * k for k in range(3, 9)]
    with pytest.raises(StopIteration):
        next(prefetcher)


class Failing:
    """Fails at step 2."""

    def __init__(self):
        self.steps = []

    def step(self, k):
        self.steps.append(k)
        if k == 2:
            raise InputError("shard x: token 5 has id 99")
        return [k]


def test_prefetcher_raises_what_the_thread_raised():
    prefetcher = Prefetcher(Failing(), 0, 10)
    assert [next(prefetcher), next(prefetcher)] == [[0], [1]]
    with pytest.raises(InputError, match="token 5") as caught:
        next(prefetcher)
    assert "in step" in "".join(traceback.format_tb(caught.tb))
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_prefetcher_keeps_to_its_depth_and_closes():
    before = threading.active_count()
    batches = Failing()
    prefetcher = Prefetcher(batches, 3, 1000, depth=4)
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert len(batches.steps) <= 5
    assert threading.active_count() == before
    assert next(prefetcher, None) is None


def test_bad_id_reaches_the_consumer(tmp_path):
    dataset = make_dataset(tmp_path / "bad", np.arange(801), vocab_size=801)
    header = dataset.headers[0]
    with open(header.path, "r+b") as file:
        file.seek(header.byte_offset + 2 * 300)
        file.write(b"\xff\xff")
    batches = make_batches([dataset], 0, 1, global_size=100)
    with pytest.raises(InputError, match="token 300 has id 65535, outside the vocabulary of 801"):
        next(Prefetcher(batches, 0, 1))
