"""Every kind of training on a pretended device: the host's numbers, one wait of the host a step and
the others by name, devices apart."""

import pytest

from tests._configs import layout
from tests.device import _pretend
from tests.device.test_engine import BERT, LLAMA, check_like_the_host
from tests.parallel import parallel

PROCESS = "device"  # torch takes the pretended device on before its first backward
pytestmark = pytest.mark.skipif(bool(_pretend.available()), reason=str(_pretend.available()))

STEP = "event at engine/engine.py:step"
LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.dropout": 0.1}
FEW = {"quantize.weights": "nf4", "quantize.block": 8}
BF16 = {"precision.compute": "bf16"}
FP8 = {"precision.compute": "fp8"}
# what rounding leaves of a gradient near zero, AdamW makes a step of
SGD = {"optimizer.kind": "sgd", "optimizer.momentum": 0.9}
CLASSES = {"task.kind": "classification", "task.labels": ["no", "maybe", "yes"]}
KINDS = {
    "fp64": {"precision.compute": "fp64"},
    "lora": LORA | BF16,
    "ia3": {"adapt.method": "ia3"} | LLAMA,
    "qlora": LORA | FEW | SGD | LLAMA,
    "qlora bf16": LORA | FEW | BF16,
    "rounded to int8": {"quantize.weights": "int8", "quantize.block": 8},
    "rounded to int4": {"quantize.weights": "int4", "quantize.block": 8} | BF16,
    "rounded to nf4": FEW | {"precision.compute": "fp64"},
    "muon": {"optimizer.kind": "muon"},
    "muon, mean of weights": {"optimizer.kind": "muon", "optimizer.ema_decay": 0.9} | BF16,
    "lion": {"optimizer.kind": "lion"},
    "sgd": SGD,
    "mean of weights": {"optimizer.ema_decay": 0.9},
    "rates": {"optimizer.groups": [{"names": ["*.bias"], "learning_rate_factor": 0.1}]},
    "classes": CLASSES,
    "classes of bert": BERT | CLASSES,
    "choice": {"task.kind": "choice", "task.choices": 2},
    "qwen3": {"model.kind": "qwen3"},
    "gemma2": {"model.kind": "gemma2"} | SGD,
    "fp8 block": FP8,
    "fp8 delayed": FP8 | {"precision.fp8": "delayed"},
    "mistral": {"model.kind": "mistral", "model.sliding_window": 8},
}
SHORT = ("muon, mean of weights", "classes", "fp8 delayed")


@parallel(ranks=[1])
@pytest.mark.parametrize(
    "kind", [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in KINDS]
)
def test_values_are_those_of_the_host_and_it_waits_once_a_step(comm, kind):
    assert check_like_the_host(comm, KINDS[kind]) == [[STEP]] * 2


TWO = layout(d=2)


def method(name: str, **keys: object) -> dict:
    return TWO | {"data_parallel.method": name} | {f"data_parallel.{k}": v for k, v in keys.items()}


def codes(compressor: str, feedback: str = "mem_sgd", **keys: object) -> dict:
    asked = {"compressor": compressor, "error_feedback": feedback, **keys}
    return method("compressed", **asked)


QUIET = {"consensus_every": 0}
LAYOUTS = {
    "noise": TWO | {"log.gradient_noise_every_steps": 1},
    **{f"zero {zero}": TWO | {"parallel.zero": zero} for zero in (0, 1, 2, 3)},
    "zero 3, lora": TWO | {"parallel.zero": 3} | LORA,
    "zero 2, qlora": TWO | {"parallel.zero": 2} | LORA | FEW | SGD,
    "zero 3, rounded": TWO | {"parallel.zero": 3} | FEW | BF16,
    "zero 3, mean of weights": TWO | {"parallel.zero": 3, "optimizer.ema_decay": 0.9},
    "zero 2, muon": TWO | {"parallel.zero": 2, "optimizer.kind": "muon"},
    "muon, slices": layout(t=2) | {"optimizer.kind": "muon"},
    "qlora, slices": layout(t=2) | LORA | FEW | SGD | LLAMA,
    "lora, stages": layout(p=2) | LORA,
    "classes, stages": layout(p=2) | CLASSES,
    "server": method("parameter_server"),
    "ring": method("ring"),
    "neighbours": method("decentralized", **QUIET),
    "neighbours, under way": method("decentralized", overlap=True, **QUIET),
    "neighbours, codes": method("decentralized", compressor="top_k", ratio=0.25, **QUIET),
    "local": method("local", local_steps=2, **QUIET),
    "local, outer step": method("local", outer_momentum=0.5, **QUIET),
    "local, codes": method("local", compressor="int8", block=32, error_feedback="mem_sgd", **QUIET),
}
CODES = {
    "top_k": codes("top_k", ratio=0.25),
    "top_k, all": codes("top_k", ratio=1.0),
    "random_k": codes("random_k", "none", ratio=0.25),
    "sign": codes("sign"),
    "qsgd": codes("qsgd"),
    "int4": codes("int4", "double_squeeze"),
    "power_sgd": codes("power_sgd", rank=1),
    "ef21": codes("top_k", "ef21", ratio=0.25),
    "neolithic": codes("top_k", "neolithic", ratio=0.25),
}
CONSENSUS = method("local", local_steps=2, consensus_every=2)
SHORT_LAYOUTS = ("muon, slices", "neolithic")
NAMES = [
    pytest.param(name, marks=[] if name in SHORT_LAYOUTS else pytest.mark.long)
    for name in (*LAYOUTS, *CODES)
]


def own(waits: list[list[str]]) -> list[list[str]]:
    """Those of the engine: messages are staged through the host by `mpi`, which waits for them."""
    return [[where for where in step if "comm/" not in where] for step in waits]


@pytest.mark.long
@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", NAMES)
def test_values_of_two_ranks_are_those_of_the_host(comm, name):
    """Whether a gradient may be remembered at all is asked before its codes are sent, in a second
    wait."""
    asked = ["event at engine/data_parallel/compressed.py:_overflows"] if name in CODES else []
    waits = check_like_the_host(comm, (LAYOUTS | CODES)[name])
    assert own(waits) == [[*asked, STEP]] * 2


@pytest.mark.long
@parallel(ranks=[2])
def test_how_far_replicas_are_apart_waits_once_more(comm):
    """In those steps in which it is asked for."""
    waits = check_like_the_host(comm, CONSENSUS)
    assert own(waits) == [[STEP], [STEP, "_local_scalar_dense at engine/replicas.py:consensus"]]


@pytest.mark.long
@parallel(ranks=[1])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["optimizer", "disk"])
def test_an_update_on_the_host_waits_for_nothing_else(comm, tmp_path, place, compute):
    """Gradients arrive while the host waits for loss and norm; weights are waited for by nobody."""
    changes = {"parallel.offload": place, "run.dir": str(tmp_path), "precision.compute": compute}
    assert check_like_the_host(comm, changes) == [[STEP]] * 2
