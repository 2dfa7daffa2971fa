"""The data-parallel methods that the benchmark compares, as sections of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
# The settings of the optimizer for plain SGD. The optimizer has no momentum and no clipping,
# because the papers define the residuals of error feedback for SGD without momentum and clipping.
SGD: Settings = {
    "kind": "sgd",
    "learning_rate": 0.5,
    "weight_decay": 0.0,
    "clip_norm": 0.0,
    "decay": "constant",
}


TOP_K: Settings = {"compressor": "top_k"}


@dataclass(frozen=True)
class MethodCase:
    """A training method: its name in tables, its section [data_parallel], and the keys of
    [optimizer] that differ from the settings of AdamW."""

    name: str
    section: Settings
    optimizer: Settings = field(default_factory=dict)

    def by_sgd(self) -> "MethodCase":
        """Return the same method, but with plain SGD instead of AdamW, as in the papers about these
        methods."""
        return MethodCase(f"{self.name}, SGD", self.section, SGD)


def _top_k(ratio: float, feedback: str, **more: Any) -> MethodCase:
    names = {
        "none": "top-k without feedback",
        "mem_sgd": "MEM-SGD",
        "double_squeeze": "DoubleSqueeze",
        "ef21": "EF21",
        "neolithic": "NEOLITHIC, R = 2",
    }
    section = {"method": "compressed", **TOP_K, "ratio": ratio}
    return MethodCase(
        f"{names[feedback]}, {ratio:.0%}", {**section, "error_feedback": feedback, **more}
    )


def _gossip(topology: str, **more: Any) -> MethodCase:
    words = topology.replace("_", " ").replace("one peer", "one-peer")
    return MethodCase(
        f"DSGD, {words}{', average every 8' if more else ''}",
        {"method": "decentralized", "topology": topology, **more},
    )


PSGD = MethodCase("all_reduce", {"method": "all_reduce"})
SAME = [
    PSGD,
    MethodCase("ring", {"method": "ring"}),
    MethodCase("parameter server", {"method": "parameter_server"}),
]
GOSSIP = [
    _gossip("ring"),
    _gossip("exponential"),
    _gossip("one_peer_exponential"),
    _gossip("ring", average_every=8),
]
CHOCO = [
    MethodCase(
        f"CHOCO-SGD, ring, top-k, {ratio:.0%}",
        {
            "method": "decentralized",
            **TOP_K,
            "ratio": ratio,
            "consensus_rate": rate,
        },
    )
    for ratio, rate in ((0.01, 0.05), (0.05, 0.2))
]
LOCAL = [
    *(MethodCase(f"local, K = {k}", {"method": "local", "local_steps": k}) for k in (2, 8, 32)),
    MethodCase(
        "DiLoCo, K = 8",
        {"method": "local", "local_steps": 8, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    ),
    MethodCase(
        "Qsparse-local, K = 8, top-k, 5%",
        {"method": "local", "local_steps": 8, **TOP_K, "ratio": 0.05, "error_feedback": "mem_sgd"},
    ),
    MethodCase("FedPAQ, K = 8, int8", {"method": "local", "local_steps": 8, "compressor": "int8"}),
]
FEEDBACK = ("none", "mem_sgd", "double_squeeze", "ef21", "neolithic")
COMPRESSED = [_top_k(ratio, feedback) for ratio in (0.01, 0.05) for feedback in FEEDBACK]
CODED = [
    MethodCase("QSGD, 127 levels", {"method": "compressed", "compressor": "qsgd"}),
    MethodCase(
        "int8, MEM-SGD",
        {"method": "compressed", "compressor": "int8", "error_feedback": "mem_sgd"},
    ),
    MethodCase(
        "PowerSGD, rank 2, MEM-SGD",
        {"method": "compressed", "compressor": "power_sgd", "error_feedback": "mem_sgd"},
    ),
]
ALL = [*SAME, *GOSSIP, *CHOCO, *LOCAL, *COMPRESSED, *CODED]
PLAIN = [case.by_sgd() for case in (PSGD, *COMPRESSED)]
