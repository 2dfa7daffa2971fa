"""The whole engine on a pretended device: values of the host, one wait a step, devices apart."""

import functools
import gc

import pytest
import torch

from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import MicrobatchPass, Placing
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.kernels import USUAL
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, microbatches, whole_weights
from tests._layers import difference
from tests.device import _pretend
from tests.device._pretend import MixedDevices, pretended
from tests.device._seen import SEEN
from tests.device._streams import MODULE
from tests.parallel import parallel

PROCESS = "device"  # torch takes the pretended device on before its first backward
pytestmark = pytest.mark.skipif(bool(_pretend.available()), reason=str(_pretend.available()))

LLAMA = {"model.kind": "llama", "model.kv_heads": 2}
BERT = {"model.kind": "bert", "model.sentence_order": True}
WINDOWS = {"model.sliding_window": 8, "model.logit_softcap": 5.0, "model.attention_softcap": 5.0}
DROPS = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
KINDS = {
    "gpt": {},
    "gpt bf16": {"precision.compute": "bf16"},
    "gpt fp16": {"precision.compute": "fp16"},
    "llama bf16": LLAMA | {"precision.compute": "bf16"},
    "bert": BERT,
    "windows and caps": LLAMA | WINDOWS,
    "dropout": DROPS | LLAMA,
    "recomputed": LLAMA | {"recompute.mode": "full"},
    "selective": {"recompute.mode": "selective", "precision.compute": "bf16"},
    "reproducible": {"run.reproducible": True},
}
# beside the host, whose products of half types and order of sums are others
CLOSE = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 2e-2, "bf16": 2e-2, "fp8": 2e-2}


def engine_on(comm, changes: dict, device: torch.device) -> Engine:
    config = small(changes, comm.size)
    wire = wire_named("auto", device)
    return Engine(config, World(comm).split(grid_of(config), wire), VOCAB_SIZE, device)


def through_the_host(where: str) -> bool:
    """Whether a copy is of what stages messages on the host."""
    return "comm/" in where


def trained(comm, changes: dict, device: torch.device, steps: int, masked: bool) -> tuple:
    """The engine behind some steps, their results, and where the host waited in each."""
    engine, placing = engine_on(comm, changes, device), Placing(device)
    results, waits = [], []
    for step in range(steps):
        found = microbatches(engine.config, step, engine.axes["data"].rank, masked=masked)
        SEEN.begin()
        results.append(engine.step(step, placing.place(found)))
        waits.append(list(SEEN.waits))
        assert not [where for where in SEEN.pageable if not through_the_host(where)]
    engine.axes.clock.settle()  # the last update is still under way
    return engine, results, waits


def check_like_the_host(comm, changes: dict, *, steps: int = 2, masked: bool = True) -> list:
    """The same losses, norms and weights as on the host; returns the waits of each step."""
    with pretended() as device:
        engine, results, waits = trained(comm, changes, device, steps, masked)
        on_host, expected, _ = trained(comm, changes, torch.device("cpu"), steps, masked)
        close = CLOSE[engine.config.precision.compute]
        for found, known in zip(results, expected, strict=True):
            assert found.loss == pytest.approx(known.loss, rel=close)
            assert found.grad_norm == pytest.approx(known.grad_norm, rel=4 * close)
            assert found.skipped == known.skipped
            ops, known_ops = (
                [span.op for span in one.spans if span.computes] for one in (found, known)
            )
            assert found.compute_s > 0 and ops == known_ops
        # a host that widens bfloat16 adds up Muon's products in another order than the device
        muon = engine.config.optimizer.kind == "muon" and USUAL.widens("cpu", torch.bfloat16)
        # of replicas that differ there is no whole
        if close <= CLOSE["fp32"] and not engine.policy.differs:
            weights, known_weights = whole_weights(engine), whole_weights(on_host)
            for name, values in weights.items():
                if not name.endswith("qkv.bias"):  # its gradient is rounding, which Adam blows up
                    apart = difference(values.cpu(), known_weights[name])
                    assert apart < (1e-2 if muon else 1e-3), (name, apart)
    gc.collect()
    return waits


def some(*short: str) -> list:
    """Return the names of KINDS; those not in `short` are long."""
    return [pytest.param(one, marks=[] if one in short else pytest.mark.long) for one in KINDS]


@pytest.mark.cases(1)
@parallel(ranks=[1])
@pytest.mark.parametrize("kind", some("gpt fp16", "bert", "dropout", "reproducible"))
def test_one_wait_a_step(comm, kind):
    """Before the update, where loss and norm decide; and nothing is copied out of memory that the
    system may page out. On a device that has shapes and no values."""
    with pretended("meta") as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterBuffer, "initialise", lambda self, *which, **frozen: None)
        _, results, waits = trained(comm, KINDS[kind], device, 1, True)
    assert waits == [["event at engine/engine.py:step"]] and not results[0].skipped


@parallel(ranks=[1])
@pytest.mark.parametrize("kind", some("windows and caps"))
def test_values_are_those_of_the_host(comm, kind):
    for waits in check_like_the_host(comm, KINDS[kind]):
        assert waits == ["event at engine/engine.py:step"]


@parallel(ranks=[1])
def test_steps_without_a_loss_mask_wait_as_often(comm):
    (waits,) = check_like_the_host(comm, LLAMA, steps=1, masked=False)
    assert waits == ["event at engine/engine.py:step"]


LAYOUTS = {
    "slices": layout(t=2) | {"parallel.sequence_parallel": True},
    "zb-h1": layout(p=2) | {"parallel.schedule": "zb-h1"},
    "zero 3, recomputed": layout(d=2) | {"parallel.zero": 3, "recompute.mode": "full"},
    "zero 1, bf16": layout(d=2) | {"parallel.zero": 1, "precision.compute": "bf16"},
    "zb-v": layout(p=2, v=2) | {"parallel.schedule": "zb-v", "model.layers": 4},
    "zero 2, llama": layout(d=2) | {"parallel.zero": 2} | LLAMA,
}


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[] if one in ("zero 3, recomputed", "zb-v") else pytest.mark.long)
        for one in LAYOUTS
    ],
)
def test_layouts(comm, name):
    """Staged through the host by `mpi`; what the engine itself waits for is one event."""
    for waits in check_like_the_host(comm, LAYOUTS[name], steps=1):
        own = [where for where in waits if "comm/" not in where]
        assert own == ["event at engine/engine.py:step"]


@pytest.mark.long
@parallel(ranks=[4], limit_s=300)
@pytest.mark.parametrize(("number", "kind"), [*enumerate(KINDS)])
def test_every_kind_in_a_layout(comm, number, kind):
    """All four layouts, and all four stages of ZeRO, each with another kind of model."""
    t, p, d = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)][number % 4]
    zero = 1 if kind == "reproducible" else (number + number // 4) % 4  # at most 1 goes with it
    changes = KINDS[kind] | layout(t, p, 1, d) | {"model.layers": 4, "parallel.zero": zero}
    if t > 1:
        changes["parallel.sequence_parallel"] = True
    for waits in check_like_the_host(comm, changes):
        assert [where for where in waits if "comm/" not in where] == [
            "event at engine/engine.py:step"
        ]


@parallel(ranks=[1])
def test_what_mixes_devices_or_waits_is_seen(comm):
    """The faults that these tests are for, planted."""
    with pretended() as device:
        engine = engine_on(comm, {}, device)
        batches = microbatches(engine.config, 0, 0)
        with pytest.raises(MixedDevices, match="host"):
            engine.step(0, batches)
        SEEN.begin()
        weight = engine.buffer.weights
        float(weight.sum()), weight[weight > 0], weight.cpu()
        assert [where.split(" at ")[0] for where in SEEN.waits] == [
            "_local_scalar_dense",
            "index by a mask",
            "copy",
        ]
        assert SEEN.pageable == ["copy at ?"]


@parallel(ranks=[1])
def test_a_ring_of_two(comm):
    """What was placed stays for two calls; nothing waits but for what is long done."""
    with pretended() as device:
        engine, placing = engine_on(comm, {}, device), Placing(device)
        host = [microbatches(engine.config, step, 0) for step in range(5)]
        placed = []
        for step, batches in enumerate(host):
            SEEN.begin()
            placed.append(placing.place(batches))
            assert SEEN.pageable == []
            assert SEEN.launches["copy_"] == 1  # all of a step at once
            for back in range(min(2, len(placed))):
                for one, known in zip(placed[step - back], host[step - back], strict=True):
                    assert torch.equal(one.inputs.cpu(), known.inputs)
                    assert torch.equal(one.weights.cpu(), known.weights)
                    assert (one.tokens, one.orders) == (known.tokens, known.orders)
            MODULE.catch_up()
        storages = {one[0].inputs.inner.untyped_storage()._cdata for one in placed}
        assert len(storages) == 2


@functools.cache
def launches(kind: str, layers: int) -> dict[str, int]:
    """Operations of each part of a step on the device, with so many layers."""
    from mpi4py import MPI

    changes = KINDS[kind] | {"model.layers": layers, "batch.global_size": 2}
    with pretended() as device:
        engine = engine_on(MPI.COMM_SELF, changes, device)
        (batch,) = Placing(device).place(microbatches(engine.config, 0, 0, masked=False))
        (stage,) = engine.stages.values()
        given = MicrobatchPass(0, batch, 0)
        stage.begin_step()
        found = {}
        for part, work in {
            "forward": lambda: stage.forward_microbatch(given, None),
            "backward": lambda: stage.backward_microbatch(given, None),
            "norm": engine.reduction.global_norm,
            "update": lambda: engine.optimizer.step(1e-3, 1.0),
        }.items():
            SEEN.begin()
            work()
            found[part] = sum(SEEN.launches.values())
    return found


# What a layer and a microbatch may launch, forward and backward: the host needs some microseconds
# for each. RMSNorm counts as the dozen operations that torch composes it of where it has no kernel.
BUDGET = {
    "gpt bf16": (10, 27),
    "llama bf16": (30, 57),
    "dropout": (185, 65),
    "recomputed": (28, 80),  # of them copies of keys and values, which float32 shares nowhere
}


@parallel(ranks=[1])
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[] if "bf16" in one else pytest.mark.long) for one in BUDGET]
)
def test_launches_of_a_layer(comm, kind):
    few, more = launches(kind, 2), launches(kind, 4)
    per_layer = {part: (more[part] - few[part]) / 2 for part in few}
    forward, backward = BUDGET[kind]
    assert per_layer["forward"] <= forward and per_layer["backward"] <= backward, per_layer
    # one call for all parameters, whatever their number
    assert per_layer["norm"] == per_layer["update"] == 0
