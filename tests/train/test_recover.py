"""Ranks are killed with SIGKILL at chosen places; the others go on as if nothing had happened."""

from pathlib import Path

import numpy as np
import pytest

from tests._killed import LOST, check_close, check_same, command, disturbed, losses, prepare
from tests._runs import records
from tests.parallel import mpirun

EIGHT = "batch.global_size=8"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus) -> Path:
    """The run on one rank: with `reproducible` every p and d has its bits."""
    mpirun(1, command("-m", "ptdmpi", "run.name=straight"), cwd=corpus, timeout_s=100)
    return corpus / "runs/straight"


def test_rank_0_is_lost_then_another_and_one_goes_on(corpus, undisturbed):
    """From the live state: in the middle of a step, and between a step's update and its record."""
    kills = [(0, "op", 2), (2, "record", 5)]
    disturbed(corpus, 3, kills, "run.name=twice")
    first, second = losses(corpus / "runs/twice")
    assert first.startswith("rank 0 (") and "lost in step 2; 2 ranks continue: t=1,p=1,d=2" in first
    assert "from live state of step 1, " in first
    assert (
        second.startswith("rank 2 (") and "lost in step 5; 1 rank continues: t=1,p=1,d=1" in second
    )
    assert "from live state of step 5, " in second
    check_same(corpus / "runs/twice", undisturbed)
    kept = records(corpus / "runs/twice")
    # step 5 was trained by two ranks, and recorded by the one that was left
    assert [r["rank_count"] for r in kept if "loss" in r] == [3, 2, 2, 2, 1, 1]


# The disk has no room in steps 3 and 4.
FULL_DISK = """
import errno
from ptdmpi.checkpoint import save as saving
from ptdmpi.config import InputError
from ptdmpi.engine import engine as engines
from ptdmpi.train.records import directory as files
trained, first_step_of = [0], engines.Engine.step
def in_turn(self, number, batches):
    trained[0] = number + 1
    return first_step_of(self, number, batches)
engines.Engine.step = in_turn
def fails(owner, name, error):
    work = getattr(owner, name)
    def patched(*arguments):
        if trained[0] in (3, 4):
            raise error
        return work(*arguments)
    setattr(owner, name, patched)
full = OSError(errno.ENOSPC, "No space left on device")
fails(files, "append_lines", full)
fails(files, "write_whole", full)
fails(saving.files, "require_space", InputError("no space for one checkpoint"))
"""


@pytest.mark.long
def test_a_rank_is_lost_while_the_disk_is_full(corpus, undisturbed):
    """The others go on with the live state, and write the waiting lines when there is room."""
    kills = [(1, "op", 4)]
    settings = ("run.name=full", "checkpoint.every_steps=6", "log.validate_every_steps=6")
    done = disturbed(corpus, 3, kills, *settings, first=FULL_DISK)
    assert "the run continues with its state in memory" in done.stdout
    (line,) = losses(corpus / "runs/full")
    assert "lost in step 4; 2 ranks continue" in line and "from live state of step 3, " in line
    kept = [record["loss"] for record in records(corpus / "runs/full") if "loss" in record]
    alone = [record["loss"] for record in records(undisturbed) if "loss" in record]
    assert kept == alone


@pytest.mark.long
def test_a_spare_rank_takes_over_from_the_checkpoint(corpus, undisturbed):
    """The only holder of the second stage dies while step 4 is saved: step 2 is what there is."""
    disturbed(
        corpus, 3, [(1, "save", 4)], "run.name=stage", "run.spare_ranks=1", "parallel.pipeline=2"
    )
    (line,) = losses(corpus / "runs/stage")
    assert "lost in step 4; 2 ranks continue: t=1,p=2,d=1" in line
    assert "from checkpoint of step 2, " in line
    check_same(corpus / "runs/stage", undisturbed)


@pytest.mark.long
def test_a_spare_rank_takes_the_live_state_and_one_is_lost_meanwhile(corpus, undisturbed):
    """Rank 1 dies in a validation; rank 3, that was to replace it, while it receives the state."""
    kills = [(1, "validation", 4), (3, "recovery", 0)]
    disturbed(corpus, 4, kills, "run.name=meanwhile", "run.spare_ranks=1", "parallel.data=3")
    (line,) = losses(corpus / "runs/meanwhile")
    assert line.startswith("ranks 1 (") and ", 3 (" in line
    assert "lost in step 4; 2 ranks continue: t=1,p=1,d=2" in line
    assert "from live state of step 4, " in line
    check_same(corpus / "runs/meanwhile", undisturbed)


@pytest.mark.long
def test_split_backwards_go_on_from_the_live_state(corpus):
    """A rank dies between an I and its W; then one that, in a V, holds both ends of the model."""
    folder, deeper = corpus / "runs", "model.layers=4"
    mpirun(1, command("-m", "ptdmpi", "run.name=alone-zb-v", deeper), cwd=corpus)
    settings = (deeper, "parallel.schedule=zb-v", "parallel.virtual=2")
    settings += ("run.name=zb-v", "parallel.pipeline=2", "run.spare_ranks=1")
    disturbed(corpus, 5, [(2, "weights", 2), (0, "weights", 4)], *settings)
    first, second = losses(folder / "zb-v")
    assert "lost in step 2; 4 ranks continue: t=1,p=2,d=2" in first
    assert "from live state of step 1, " in first
    assert "lost in step 4; 2 ranks continue (1 spare): t=1,p=2,d=1" in second
    assert "from live state of step 3, " in second
    check_same(folder / "zb-v", folder / "alone-zb-v")


@pytest.mark.long
def test_too_few_ranks_end_and_the_same_command_resumes(corpus, undisturbed):
    settings = ("run.name=few", "parallel.pipeline=2")
    ended = disturbed(corpus, 2, [(0, "before the update", 3)], *settings, check=False)
    assert ended.returncode not in (0, 2)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("ptdmpi: error: ")]
    assert len(lines) == 1 and "1 rank cannot hold t=1,p=2" in lines[0], ended.stderr
    assert losses(corpus / "runs/few") == [lines[0].removeprefix("ptdmpi: error: ")]
    disturbed(corpus, 2, [], *settings)
    check_same(corpus / "runs/few", undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_replicas_that_differ_go_on_without_a_lost_one(corpus, overlap):
    """In an op the others keep what they have; amid an exchange nobody has a state, but the
    checkpoint has every replica's, and their mean is what fewer begin from. It is left
    to chance if an exchange that overlaps the op was over by then."""
    name = f"gossip-{overlap}"
    settings = (f"run.name={name}", "run.reproducible=false", f"data_parallel.overlap={overlap}")
    settings += ("data_parallel.method=decentralized", "data_parallel.consensus_every=1")
    disturbed(corpus, 3, [(1, "op", 2), (2, "mixing", 5)], *settings)
    first, second = losses(corpus / "runs" / name)
    assert "lost in step 2; 2 ranks continue: t=1,p=1,d=2" in first
    assert overlap == "true" or "from live state of step 1, " in first
    assert "lost in step 5; 1 rank continues: t=1,p=1,d=1" in second
    assert "from checkpoint of step 4, " in second
    kept = [r for r in records(corpus / "runs" / name) if "loss" in r]
    assert [r["step"] for r in kept] == [1, 2, 3, 4, 5, 6]
    assert [r["rank_count"] for r in kept][1:] == [2, 2, 2, 1, 1]
    assert all(r["consensus_distance"] > 0 for r in kept if r["rank_count"] > 1)


CODES = ("data_parallel.compressor=top_k", "data_parallel.ratio=0.1")
LESS = {
    "local": ("data_parallel.local_steps=3", "mixing", 3, 2),
    "compressed": (*CODES, "data_parallel.error_feedback=ef21", "coding", 5, 4),
    "decentralized": (*CODES, "coding", 5, 4),
}


@pytest.mark.long
@pytest.mark.parametrize("method", LESS)
def test_methods_that_tell_less_go_on_without_lost_replicas(corpus, method):
    """In an op the others keep what they have; where memories are half of this step, and half of
    the last, or replicas are being mixed, all begin from the checkpoint."""
    *more, place, step, saved = LESS[method]
    settings = (f"run.name=less-{method}", "run.reproducible=false", *more)
    settings += (f"data_parallel.method={method}",)
    disturbed(corpus, 3, [(1, "op", 2), (2, place, step)], *settings)
    first, second = losses(corpus / "runs" / f"less-{method}")
    assert "2 ranks continue: t=1,p=1,d=2,v=1,b=1 from live state of step 1" in first
    assert f"1 rank continues: t=1,p=1,d=1,v=1,b=1 from checkpoint of step {saved}, " in second
    kept = [record for record in records(corpus / "runs" / f"less-{method}") if "loss" in record]
    assert [record["step"] for record in kept] == [1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(record["loss"]) for record in kept)


@pytest.mark.long
def test_a_launcher_that_would_end_the_job_is_refused(corpus):
    words = command("-m", "ptdmpi", "run.name=plain", "run.on_failure=shrink")
    refused = mpirun(1, words, cwd=corpus, check=False, timeout_s=100)
    assert refused.returncode == 2
    assert "legal: mpirun --with-ft ulfm" in refused.stderr
    assert not (corpus / "runs/plain/checkpoints").exists()


@pytest.fixture(scope="module")
def eight_undisturbed(corpus) -> Path:
    """The run on one rank that sharded ones are held against. With `zero` = 1 in one group, and
    `reproducible`, they have its bits; else sums have other orders, and all is equal to rounding.
    """
    words = command("-m", "ptdmpi", "run.name=eight", EIGHT)
    mpirun(1, words, cwd=corpus, timeout_s=100)
    return corpus / "runs/eight"


def hybrid(zero: int) -> tuple[str, ...]:
    return (EIGHT, f"parallel.zero={zero}", "parallel.shard_group=2")


@pytest.mark.long
def test_a_lost_shard_comes_from_the_checkpoint_in_fewer_shards(corpus, eight_undisturbed):
    """Between update and gather of the weights, and then in a validation."""
    kills = [(1, "before the weights", 3), (0, "validation", 6)]
    settings = (EIGHT, "parallel.zero=1", "run.name=fewer")
    disturbed(corpus, 4, kills, *settings)
    first, second = losses(corpus / "runs/fewer")
    assert (
        "lost in step 3; 2 ranks continue (1 spare): t=1,p=1,d=2,v=1,b=1, ZeRO 1 in 2 shards from"
        in first
    )
    assert f"from checkpoint{LOST} of step 2, " in first
    assert (
        "lost in step 6; 2 ranks continue: t=1,p=1,d=2,v=1,b=1, ZeRO 1 in 2 shards from" in second
    )
    assert f"from checkpoint{LOST} of step 4, " in second
    check_same(corpus / "runs/fewer", eight_undisturbed)


@pytest.mark.parametrize(
    ("zero", "place"),
    [
        pytest.param(3, "gather", marks=pytest.mark.long),
        pytest.param(1, "before the update", marks=pytest.mark.long),
        pytest.param(2, "before the weights", marks=pytest.mark.long),
    ],
)
def test_another_group_holds_the_lost_shard(corpus, eight_undisturbed, zero, place):
    """Four ranks in two groups, and a spare one, which fills the hole; then a group gives way."""
    name = f"copies-{zero}-{place.replace(' ', '-')}"
    settings = (f"run.name={name}", "run.spare_ranks=1", "run.reproducible=false", *hybrid(zero))
    disturbed(corpus, 5, [(2, place, 3), (0, "op", 5)], *settings)
    first, second = losses(corpus / "runs" / name)
    layout = f"v=1,b=1, ZeRO {zero} in 2 shards"
    assert f"4 ranks continue: t=1,p=1,d=4,{layout} from live state of" in first
    assert f"2 ranks continue (1 spare): t=1,p=1,d=2,{layout} from live state of" in second
    assert LOST not in first + second
    check_close(corpus / "runs" / name, eight_undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(("zero", "place"), [(1, "op"), (2, "reduction"), (3, "gather")])
def test_beside_stages_and_a_spare_rank(corpus, eight_undisturbed, zero, place):
    """All shards of the last stage are there but one, and the hole is filled: from the checkpoint,
    in the same layout."""
    name = f"stages-{zero}"
    settings = (EIGHT, f"run.name={name}", f"parallel.zero={zero}", "parallel.pipeline=2")
    settings += ("run.spare_ranks=1", f"run.reproducible={str(zero == 1).lower()}")
    disturbed(corpus, 5, [(3, place, 4)], *settings)
    (line,) = losses(corpus / "runs" / name)
    layout = f"t=1,p=2,d=2,v=1,b=1, ZeRO {zero} in 2 shards"
    assert f"4 ranks continue: {layout} from checkpoint{LOST} of step 2" in line
    (check_same if zero == 1 else check_close)(corpus / "runs" / name, eight_undisturbed)


@pytest.mark.long
def test_both_holders_of_a_shard_are_lost(corpus, eight_undisturbed):
    kills = [(1, "gather", 4), (3, "gather", 4)]
    settings = ("run.name=both", "run.reproducible=false", *hybrid(3))
    disturbed(corpus, 4, kills, *settings)
    line = losses(corpus / "runs/both")[-1]
    assert (
        f"2 ranks continue: t=1,p=1,d=2,v=1,b=1, ZeRO 3 in 2 shards from checkpoint{LOST} of step 2"
        in line
    )
    check_close(corpus / "runs/both", eight_undisturbed)


@pytest.mark.long
def test_one_rank_is_left_of_three_shards(corpus, eight_undisturbed):
    """Nothing is sharded any more; a stop and a new start find the way back to more."""
    settings = (EIGHT, "run.name=one", "run.reproducible=false", "parallel.zero=3")
    disturbed(corpus, 2, [(0, "gather", 3)], *settings)
    (line,) = losses(corpus / "runs/one")
    assert f"1 rank continues: t=1,p=1,d=1,v=1,b=1 from checkpoint{LOST} of step 2" in line
    check_close(corpus / "runs/one", eight_undisturbed)


EXPERTS = (
    EIGHT,
    "precision.compute=fp64",
    "model.kind=llama",
    "model.expert_hidden=16",
    "model.experts=4",
    "model.experts_per_token=2",
)


@pytest.mark.long
def test_one_copy_of_the_experts_is_lost_and_then_both(corpus):
    """Ranks 1 and 3 have the same experts. A spare rank takes the place of rank 3, with the state
    of rank 1; then both are lost."""
    mpirun(1, command("-m", "ptdmpi", "run.name=mixed", *EXPERTS), cwd=corpus, timeout_s=100)
    settings = (*EXPERTS, "run.name=dealt", "run.reproducible=false", "parallel.expert=2")
    kills = [(3, "op", 4), (1, "op", 6), (4, "op", 6)]
    disturbed(corpus, 5, kills, *settings, "run.spare_ranks=1")
    first, *_, last = losses(corpus / "runs/dealt")
    assert first.startswith("rank 3 (") and "lost in step 4; 4 ranks continue: t=1,e=2" in first
    assert "d=4,v=1,b=1 from live state of step 3, " in first
    assert "2 ranks continue: t=1,e=2,p=1,d=2,v=1,b=1 from checkpoint, since no other" in last
    assert "since no other rank held the lost experts, of step 4, " in last
    check_close(corpus / "runs/dealt", corpus / "runs/mixed")


# like `comm.wire = "nccl"`, which aborts its connections and makes new ids
STAND_IN = """
from ptdmpi.config import wires
wires.WIRES["mpi"] = "tests.comm._stand_in:StandInCommunicator"
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "pipeline", "left"),
    [(3, 1, "2 ranks continue"), (4, 2, "2 ranks continue (1 spare)")],
)
def test_streams_of_a_device_are_connected_anew(corpus, ranks, pipeline, left):
    """Messages wait in streams of their own when a rank dies; the bits are those of a run on `mpi`
    that loses the same rank at the same place."""
    where = ("run.reproducible=false", f"parallel.pipeline={pipeline}", "batch.global_size=12")
    for name, first in (("plain", ""), ("streams", STAND_IN)):
        named = f"run.name={name}-{pipeline}"
        disturbed(corpus, ranks, [(1, "op", 3)], named, *where, first=first)
        (line,) = losses(corpus / f"runs/{name}-{pipeline}")
        assert left in line and "from live state of step 2, " in line
    check_same(corpus / f"runs/streams-{pipeline}", corpus / f"runs/plain-{pipeline}")
