"""Stored models with modules for multi-token prediction: resumed in any layout, used, converted."""

import pytest

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.convert.upcycle.write import Experts, upcycle
from ptdmpi.inference.stored import declarations, open_model, require_weights
from tests import _stored
from tests._configs import Changes, layout
from tests._engines import build, from_root
from tests.ahead.test_parity import LLAMA, MIXED, TIED, batches_of
from tests.checkpoint.test_sharded import assert_whole, checkpoints, saved
from tests.experts.test_expert_parallel import dealt, trained
from tests.parallel import parallel

V = 51
AHEAD = {**_stored.LLAMA, "mtp_depth": 1}
# model, and the layouts before and after
MOVES: dict[str, tuple[Changes, Changes, Changes]] = {
    "p2 untied to zero 3": (LLAMA, layout(p=2), layout(d=2) | {"parallel.zero": 3}),
    "zero 1 to t2 tied": (TIED, layout(d=2) | {"parallel.zero": 1}, layout(t=2)),
    "p2 zero 0 to e2": (MIXED, layout(p=2), dealt(2, d=2)),
}


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_in_another_layout(comm, tmp_path, name):
    shape, before, after = MOVES[name]
    alone = World(comm).first(1)
    straight = trained(build(alone, shape), 0, 4, batches_of) if alone is not None else None
    world = World(comm)
    first = build(world, {**shape, **before})
    found = trained(first, 0, 2, batches_of)[0]
    assert_whole(world, saved(first, tmp_path, 2))
    second = build(world, {**shape, **after})
    progress, _ = checkpoints(second, tmp_path).resume("auto")
    assert progress is not None and progress.step == 2
    found += trained(second, 2, 4, batches_of)[0]
    expected = from_root(comm, straight)[0]
    assert sorted(found) == pytest.approx(sorted(expected), rel=1e-12)


def test_adapters_of_a_base_leave_its_modules_alone(tmp_path):
    """The declared weights of the adapted model are in the checkpoint, which has more."""
    run = open_model(_stored.stored(tmp_path / "run", V, **AHEAD))
    whole = run.config()
    model = whole.model.model_copy(update={"mtp_depth": 0})
    needed = declarations(whole.model_copy(update={"model": model}), V)
    with run.reader() as reader:
        require_weights(reader, needed)
        require_weights(reader, declarations(whole, V))
        with pytest.raises(InputError, match="is not a tensor of the model"):
            require_weights(reader, {n: d for n, d in needed.items() if n != "final_norm.weight"})


def test_hugging_face_gets_the_model_without_modules(tmp_path):
    run = _stored.stored(tmp_path / "run", V, **AHEAD)
    done = to_hf(run, tmp_path / "hf")
    assert done.note.endswith("without the modules for multi-token prediction")
    back = from_hf(tmp_path / "hf", tmp_path / "back")
    assert back.difference < 1e-6 and back.parameters == done.parameters
    assert open_model(tmp_path / "back").config().model.mtp_depth == 0


def test_models_with_modules_are_not_upcycled(tmp_path):
    run = _stored.stored(tmp_path / "run", V, **AHEAD)
    with pytest.raises(InputError, match="has modules for multi-token prediction; legal: a model"):
        upcycle(run, tmp_path / "mixed", Experts(4, 2))
