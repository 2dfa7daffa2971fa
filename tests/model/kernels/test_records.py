"""Which of two records of kernels a resumed run uses: its checkpoint's or its directory's."""

import json
from typing import Any

import torch

from ptdmpi.comm.world import World
from ptdmpi.model.kernels import agreement
from ptdmpi.model.kernels.agreement import RunPlace, agreed, stored
from ptdmpi.model.kernels.choice import AttentionByProducts
from tests.model.kernels.test_choice import GPU, in_triton
from tests.parallel import parallel


@parallel(ranks=[2])
def test_the_checkpoint_s_kernels_win_over_other_kernels_in_the_record(comm, tmp_path):
    """Its steps were computed with them. The record is rewritten, so this is said once."""
    world, said = World(comm), []
    place = RunPlace(torch.device("cpu"), torch.float32, {})
    warned = f"{tmp_path / agreement.FILE} names other kernels than the checkpoint; "

    def chosen(before: Any, device: RunPlace = place, **record: list[str]) -> Any:
        if comm.rank == 0 and record:
            (tmp_path / agreement.FILE).write_text(json.dumps(record))
        comm.barrier()
        said.clear()
        return agreed(world, tmp_path, device, before, say=said.append)

    other = {"attention": ["library"], "linear": ["library"], "gelu": ["sigmoid"]}
    before = {"attention": ["products:64"], "gelu": ["library"]}
    result = chosen(before, **other)
    assert (result.attention, result.gelu) == (AttentionByProducts(64), "library")
    assert said[0] == warned + "the checkpoint's are used"
    assert chosen(stored(result)) == chosen(before) == result
    assert not any("names other kernels" in line for line in said)
    chosen(None, **other)  # "anew"
    assert not any("names other kernels" in line for line in said)
    # before the first checkpoint, and on another type of device, the record decides
    assert chosen({}, **other).gelu == "sigmoid"
    assert chosen({"attention": ["flash"]}, **other).gelu == "sigmoid"
    assert len(said) == 1
    compiled = {"attention": ["flash"], "layers": ["compiled"], "triton": ["norm"]}
    with in_triton(["norm"]):
        for kept, less in ((compiled, {"attention": ["flash"]}), ({"attention": []}, compiled)):
            result = chosen(less, GPU, **kept)
            assert said[0].startswith(warned)
            assert result.compiled is (True if "layers" in less else None)
            assert result.triton == tuple(less.get("triton", ()))
            chosen(less, GPU)
            assert not said[0].startswith(warned)
