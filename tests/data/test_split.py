"""Datasets dealt to data ranks: each draws from its own, and what a global sample is stays a pure
function of the seed and its number."""

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.config import InputError, resolve
from ptdmpi.data.order import Part, SampleOrder, Start
from ptdmpi.data.split import SplitOrder
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.judge import Before
from ptdmpi.lineage.trained_on import Source, Stretch, TrainedOn

PARTS = [Part(7, "3"), Part(50, "1"), Part(20, "1"), Part(11, "1")]  # two for each of two ranks
SIZE = 12


def test_each_rank_draws_from_its_own_datasets_by_their_weights():
    order = SplitOrder(PARTS, 3, ranks=2, global_size=SIZE, start=Start())
    steps = np.arange(40 * SIZE).reshape(40, 2, SIZE // 2)
    for rank in range(2):
        datasets, samples = order.locate(steps[:, rank].reshape(-1))
        first, second = np.bincount(datasets - 2 * rank, minlength=2)
        assert (first, second) == ((180, 60) if rank == 0 else (120, 120))
        # as a run that trains on these alone would, except for the key of the permutations
        alone = SampleOrder(
            [
                Part(p.samples, p.weight, key=2 * rank + k)
                for k, p in enumerate(PARTS[2 * rank :][:2])
            ],
            3,
        )
        known = alone.locate(np.arange(240))
        assert (datasets - 2 * rank == known[0]).all() and (samples == known[1]).all()
    assert order.counts(40 * SIZE) == [180, 60, 120, 120]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 400), st.integers(0, 2**40))
def test_counts_are_those_of_what_is_located(first, total, seed):
    start = Start(first, first * SIZE)
    parts = [Part(p.samples, p.weight, None, key, key) for key, p in enumerate(PARTS)]
    order = SplitOrder(parts, seed, ranks=2, global_size=SIZE, start=start)
    datasets, samples = order.locate(start.sample + np.arange(total))
    drawn = np.bincount(datasets, minlength=4) + np.arange(4)
    assert order.counts(start.sample + total) == drawn.tolist()
    assert all(0 <= s < PARTS[d].samples for d, s in zip(datasets, samples, strict=True))
    # in any order and any pieces: nothing is remembered
    again = order.locate(start.sample + np.arange(total)[::-1])
    assert (again[0][::-1] == datasets).all() and (again[1][::-1] == samples).all()


def test_an_epoch_has_each_sample_once_and_limits_hold():
    order = SplitOrder(
        [Part(12, "1", Decimal(2)), Part(60, "1")], 0, ranks=2, global_size=4, start=Start()
    )
    datasets, samples = order.locate(np.arange(48))  # 24 of each rank
    assert (
        sorted(samples[datasets == 0][:12])
        == sorted(samples[datasets == 0][12:])
        == list(range(12))
    )
    order.check(48)
    with pytest.raises(InputError, match=r"dataset 0 would be read for 2\.167 epochs"):
        order.check(52)


def test_equal_datasets_of_two_ranks_come_in_two_orders():
    order = SplitOrder([Part(100, "1"), Part(100, "1")], 0, ranks=2, global_size=20, start=Start())
    _, samples = order.locate(np.arange(20))
    assert (samples[:10] != samples[10:]).any()


def _config(datasets: int, ranks: int, **values) -> dict:
    train = [{"path": f"d{k}"} for k in range(datasets)]
    return {
        "run": {"steps": 5, **values},
        "model": {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 8},
        "parallel": {"pipeline": 2},
        "batch": {"global_size": 12},
        "data": {"train": train, "split": "by_rank"},
    }


def test_what_cannot_be_dealt_is_refused():
    assert resolve(_config(6, 3), 6).data_size == 3
    with pytest.raises(
        InputError, match=r"divide 4 training datasets equally over 3 data ranks.*legal: 3 or 6"
    ):
        resolve(_config(4, 3), 6)
    with pytest.raises(InputError, match="without the datasets of a lost rank; legal: on_f"):
        resolve(_config(3, 3, on_failure="shrink"), 6)


def test_another_number_of_ranks_is_another_order():
    """The change is refused unless it is allowed; then each dataset continues after its draws."""

    def trained(ranks: int) -> TrainedOn:
        sources = tuple(Source(f"d{k}", str(k) * 64, 50, "1", k) for k in range(2))
        return TrainedOn("t", "0" * 64, (Stretch(0, 0, 0, 1, SIZE, 8, sources, ranks=ranks),))

    config = resolve(_config(2, 2), 4)
    course = Course(config, trained(2))
    manifest = {
        "progress": {"step": 3, "samples": 36, "seed": 1},
        "model": config.model.model_dump(),
        **course.in_manifest(),
    }
    before = Before.of("x", manifest)
    assert before.trained_on == trained(2)
    again = Course(config, trained(2))
    again.judge("resume", "x", manifest)
    assert again.answer.changed == ()
    other = Course(config, trained(1))
    with pytest.raises(InputError, match=r"dealt to 2 data ranks .* -> drawn from by all"):
        other.judge("resume", "x", manifest)
    other = Course(config.replace("data", change="from here"), trained(1))
    other.judge("resume", "x", manifest)
    assert [source.drawn for source in other.trained_on.last.sources] == [18, 18]
    older = trained(1).as_json()
    for stretch in older["stretches"]:
        del stretch["ranks"]
    assert TrainedOn.from_json(older) == trained(1)
