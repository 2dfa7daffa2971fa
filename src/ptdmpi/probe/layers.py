"""Measurements of the trainer's own layers, and the fit of a cluster's efficiency fractions to the
measured times. Inside a layer, the kernels reach only a fraction of the rates that were measured
for single kernels. The fit chooses the fractions for which the predicted times of layers agree best
with the measured times.

Layers are slower than the sum of their kernels, because Python, autograd and the allocator take
time between the kernels, and because operands are not always in the cache.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ptdmpi.base.words import counted, short
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import Config, synthetic_config
from ptdmpi.config.layout import Layout
from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.kernels.agreement import DeviceChoice
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.machine.fit import descend, distance

STEPS = 6  # number of timed steps; the first step is a warm-up
MOST_TENSOR = 8
# greatest factor by which a fitted number may differ from its starting value: MOST_FACTOR for
# kernels, MOST_LINK_FACTOR for messages
MOST_FACTOR = 100.0
MOST_LINK_FACTOR = 4.0


@dataclass(frozen=True)
class ProbedModel:
    """A small model that is measured on `micro_size` sequences of `seq_length` tokens."""

    layers: int
    hidden: int
    head_size: int
    seq_length: int
    vocab_size: int
    micro_size: int

    def scaled(self, tensor: int) -> "ProbedModel":
        """Return a model whose heads and columns can be divided evenly among `tensor` ranks."""
        heads = -(-self.hidden // self.head_size // tensor) * tensor
        return replace(self, hidden=heads * self.head_size)


CPU_CASES = (
    ProbedModel(layers=2, hidden=128, head_size=32, seq_length=128, vocab_size=512, micro_size=1),
    ProbedModel(layers=2, hidden=128, head_size=32, seq_length=128, vocab_size=512, micro_size=4),
    ProbedModel(layers=2, hidden=256, head_size=64, seq_length=256, vocab_size=2048, micro_size=1),
    ProbedModel(layers=2, hidden=256, head_size=64, seq_length=256, vocab_size=2048, micro_size=4),
    ProbedModel(layers=2, hidden=512, head_size=64, seq_length=256, vocab_size=8192, micro_size=1),
    ProbedModel(layers=2, hidden=512, head_size=64, seq_length=128, vocab_size=2048, micro_size=4),
)
GPU_CASES = (
    ProbedModel(
        layers=2, hidden=1024, head_size=64, seq_length=1024, vocab_size=8192, micro_size=1
    ),
    ProbedModel(
        layers=2, hidden=1024, head_size=64, seq_length=1024, vocab_size=8192, micro_size=8
    ),
    ProbedModel(
        layers=2, hidden=4096, head_size=128, seq_length=2048, vocab_size=8192, micro_size=1
    ),
    ProbedModel(
        layers=2, hidden=4096, head_size=128, seq_length=2048, vocab_size=8192, micro_size=4
    ),
)


@dataclass(frozen=True)
class Taken:
    """The measured times of a training step, in seconds. `forward_s`, `backward_s` and
    `optimizer_s` are medians over ranks and steps. For `rest_s`, the smallest time of each rank is
    taken over all steps, and the result is the median of these times over the ranks.

    `rest_s` is the time of a step outside forward, backward, optimizer and the all-reduce over the
    data axis. `elements` is the number of parameters of the model.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    rest_s: float
    elements: int


class Layers:
    """Measurements of the trainer's layers, and the fit of a cluster's efficiency fractions to
    these measurements."""

    def __init__(
        self, bench: Bench, world: World, precision: str, cases: Sequence[ProbedModel]
    ) -> None:
        self.bench = bench
        self.world = world
        self.precision = precision
        self.cases = cases

    def fit(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the cluster `tree` with fitted efficiency fractions and kernel launch time, and
        with two measured times: the time to update a parameter, and the fixed cost of a step."""
        taken = self.taken()
        small = min(taken, key=lambda case: case.elements)
        large = max(taken, key=lambda case: case.elements)
        per_element_s = (large.optimizer_s - small.optimizer_s) / (large.elements - small.elements)
        per_element_s = max(per_element_s, 1e-12)
        fixed_s = max(0.0, small.optimizer_s - per_element_s * small.elements) + small.rest_s
        measured = {
            **tree["measured"],
            "update_s_per_element": per_element_s,
            "step_s": fixed_s,
        }
        self.bench.note("optimizer", f"{short(1 / per_element_s)} parameters/s")
        self.bench.note("outside kernels and messages", f"{fixed_s * 1e3:.2f} ms a step")
        tree = {**tree, "measured": measured}
        keys = (
            ("efficiency", "gemm_fraction"),
            ("efficiency", "memory_fraction"),
            ("device", "kernel_s"),
        )
        tree = self._fitted(tree, keys, taken, 1)
        tensor = self._tensor()
        if tensor > 1:
            with self.bench.phase(f"layers over {tensor} ranks", len(self.cases)):
                shared = [self._take(case.scaled(tensor), tensor) for case in self.cases]
            tree = self._fitted(tree, (("efficiency", "link_fraction"),), shared, tensor)
        return tree

    def taken(self) -> list[Taken]:
        """Return the measured times of each model in `cases` with tensor-parallel size t = 1."""
        with self.bench.phase("whole layers", len(self.cases)):
            return [self._take(case, 1) for case in self.cases]

    def _tensor(self) -> int:
        """Return the largest tensor-parallel size, up to MOST_TENSOR, that divides the number of
        ranks of a node."""
        local = self.world.local_size
        return max(t for t in range(1, min(local, MOST_TENSOR) + 1) if local % t == 0)

    def _fitted(
        self,
        tree: dict[str, Any],
        keys: Sequence[tuple[str, str]],
        taken: Sequence[Taken],
        tensor: int,
    ) -> dict[str, Any]:
        """Return the cluster `tree` with fitted values of `keys`: the values that make predicted
        times agree best with the measured times `taken`.

        Only the times of forward and backward passes with tensor-parallel size `tensor` are
        compared.
        """
        cases = [case.scaled(tensor) for case in self.cases]
        models = [
            Model("probe", self._config(case, tensor).model, case.vocab_size) for case in cases
        ]

        def changed(values: Sequence[float]) -> dict[str, Any]:
            """Return the cluster `tree` with `values` as the values of `keys`."""
            new = dict(tree)
            for (section, key), value in zip(keys, values, strict=True):
                new[section] = {**new[section], key: value}
            return new

        def pairs(values: Sequence[float]) -> list[tuple[float, float]]:
            """Return (predicted seconds, measured seconds) for each forward and each backward
            pass."""
            cluster = Cluster.model_validate(changed(values))
            both = []
            for case, model, measured in zip(cases, models, taken, strict=True):
                pricer = Pricer.of(cluster, model, case.micro_size, self.precision)
                layout = Layout(tensor=tensor, pipeline=1, data=1, micro_size=case.micro_size)
                times = pricer.times.stage_times(layout, 1)
                both.append((times.forward_s[0], measured.forward_s))
                both.append((times.backward_s[0], measured.backward_s))
            return both

        start = [tree[section][key] for section, key in keys]
        most = MOST_FACTOR if tensor == 1 else MOST_LINK_FACTOR
        values = descend(lambda tried: distance(pairs(tried)), start, most)
        words = ", ".join(f"{key} {v:.3g}" for (_, key), v in zip(keys, values, strict=True))
        off = distance(pairs(values))
        where = counted(tensor, "rank")
        self.bench.note(f"layers over {where}", f"within {off:.1%} at {words}")
        return changed(values)

    def _config(self, case: ProbedModel, tensor: int) -> Config:
        data = self.world.size // tensor
        model = {
            "layers": case.layers,
            "hidden": case.hidden,
            "heads": case.hidden // case.head_size,
            "seq_length": case.seq_length,
        }
        return synthetic_config(
            Layout(tensor, 1, data, micro_size=case.micro_size),
            model,
            run={"threads": torch.get_num_threads()},
            precision={"compute": self.precision},
        )

    def _take(self, case: ProbedModel, tensor: int) -> Taken:
        """Return the measured times of a training step of the model `case` with tensor-parallel
        size `tensor`."""
        config = self._config(case, tensor)
        grid = training_grid(tensor=tensor, data=self.world.size // tensor)
        axes = self.world.split(grid, wire_named(device=self.bench.device))
        engine = Engine(config, axes, case.vocab_size, self.bench.device)
        kernels = self.bench.kernels
        engine.compute_by(kernels.choice or DeviceChoice(triton=tuple(kernels.triton)))
        batch = self._batch(case)
        microbatch = MicrobatchPass(0, batch, step=0)
        stage = engine.stages[0]
        clock = self.bench.clock if tensor == 1 else time.perf_counter

        def forward() -> None:
            """Compute the forward pass of the model's layers."""
            stage.begin_step()
            stage.forward_microbatch(microbatch, None)

        def update() -> None:
            """Update the weights of the measured model."""
            engine.optimizer.step(1e-4, float(engine.reduction.global_norm()))

        works = (forward, lambda: stage.backward_microbatch(microbatch, None), update)
        times = [self._each_s(works, clock) for _ in range(STEPS)][1:]
        forward_s, backward_s, optimizer_s = (
            self.bench.agreed(statistics.median(column)) for column in zip(*times, strict=True)
        )
        self.bench.note(
            f"h={case.hidden}, s={case.seq_length}, b={case.micro_size}, t={tensor}: "
            f"{case.layers} layers and head",
            f"forward {forward_s * 1e3:.2f} ms, backward {backward_s * 1e3:.2f} ms",
        )
        steps = [self._rest_s(engine, step, batch) for step in range(STEPS)]
        rest_s = self.bench.agreed(min(steps))
        elements = engine.buffer.gradients.numel()
        self.bench.advance(1)
        return Taken(
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=optimizer_s,
            rest_s=rest_s,
            elements=elements,
        )

    def _each_s(
        self, works: Sequence[Callable[[], object]], clock: Callable[[], float]
    ) -> list[float]:
        """Call the functions `works` one after the other, and return the seconds that each call
        takes."""
        times = []
        self.bench.everyone.barrier()
        for work in works:
            start = clock()
            work()
            self.bench.finish()
            times.append(clock() - start)
        return times

    def _rest_s(self, engine: Engine, step: int, batch: Microbatch) -> float:
        """Return the seconds of a complete step that are not spent in the forward pass, the
        backward pass, the all-reduce or the update."""
        self.bench.everyone.barrier()
        start = time.perf_counter()
        result = engine.step(step, [batch])
        engine.axes.clock.settle()
        spans = result.spans
        return time.perf_counter() - start - sum(span.end_s - span.start_s for span in spans)

    def _batch(self, case: ProbedModel) -> Microbatch:
        # use the same seed on all ranks, because the ranks of a tensor-parallel group need the same
        # tokens
        generator = torch.Generator().manual_seed(1)
        shape = (case.seq_length + 1, case.micro_size)
        ids = torch.randint(case.vocab_size, shape, generator=generator)
        batch = Microbatch.of_ids(ids, torch.arange(case.micro_size))
        return batch.each(lambda tensor: tensor.to(self.bench.device))
