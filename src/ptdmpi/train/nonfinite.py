"""A loss or gradient that is not finite: where it began, and how often it may happen.

Only the global norm and the loss are looked at in every step: both exist anyway. When one of them
is not finite nothing is updated, and since sums over ranks have spread it everywhere by then, the
step is computed once more, with every output looked at. Dropout masks belong to the samples, so the
second time is like the first.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptdmpi.engine.engine import Engine, StepResult
from ptdmpi.engine.runner import OpHook
from ptdmpi.model.batch import Batch
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.stage import Stage
from ptdmpi.model.transformer import Block
from ptdmpi.plan.schedule.ops import ACTIVATIONS, Op

FAILED_EXIT_CODE = 1
# In the order in which one leads to the next: the first is the cause.
_FROZEN, _WEIGHT, _OUTPUT, _LOSS, _GRADIENT = range(5)


@dataclass(frozen=True, order=True)
class Finding:
    """One value that is not finite. Findings are ordered from cause to effect.

    `microbatch` counts within the global batch; -1 for weights.
    """

    kind: int
    microbatch: int
    depth: tuple[int, ...]  # stage and place in it, in the order of computation
    rank: int
    what: str
    samples: tuple[int, ...]


class Skips:
    """Counts the steps in a row that were skipped because something was not finite.

    fp16's overflows do not count while its loss scale can still fall.
    """

    def __init__(
        self,
        engine: Engine,
        names: Callable[[int], str],
        max_skips: int,
        say: Callable[[str], None],
    ) -> None:
        self.engine, self.names, self.max_skips, self.say = engine, names, max_skips, say
        self.in_a_row = 0

    def after(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        """Look at the result of step `step` (from 0); every rank calls it.

        Raises SystemExit (1) on every rank after more than `max_skips` in a row, and at once if a
        weight is not finite: no later step mends it, and it must not get into a checkpoint.
        """
        if not result.skipped:
            self.in_a_row = 0
        if not result.skipped or result.overflow:
            return
        self.in_a_row += 1
        finding = examine(self.engine, step, batches)
        size = self.engine.config.batch.global_size
        where = "not finite once, finite when computed again: a fault of the hardware is likely"
        if self.engine.config.run.compile:  # which fuses, and so rounds otherwise
            where = "not finite as compiled, finite when computed again by uncompiled layers"
        # rank 0, which speaks, has the first samples of the step
        first = int(batches[0].samples[0])
        samples = f"{first} to {first + size - 1}"
        if finding is not None:
            where = f"{finding.what} on {self.names(finding.rank)} is not finite"
            if finding.samples:
                where += f", microbatch {finding.microbatch} of the batch"
                samples = ", ".join(map(str, finding.samples))
        count = f"{self.in_a_row} in a row, at most {self.max_skips}"
        self.say(
            f"step {step + 1} skipped ({count}): loss {result.loss}, grad norm {result.grad_norm}; "
            f"{where}; samples {samples}"
        )
        if finding is not None and finding.kind <= _WEIGHT:
            lost = "a weight is lost; the same command goes on from what is saved"
            frozen = "adapt.base has a weight that is no number; legal: one that is whole"
            self.say(f"stopped: {frozen if finding.kind == _FROZEN else lost}")
            raise SystemExit(FAILED_EXIT_CODE)
        if self.in_a_row > self.max_skips:
            self.say(f"stopped: more than run.max_skips = {self.max_skips} steps were skipped")
            raise SystemExit(FAILED_EXIT_CODE)


def examine(engine: Engine, step: int, batches: Sequence[Batch]) -> Finding | None:
    """Compute the step again and find where it is first not finite; the same on every rank.

    The gradients are zero afterwards; weights and optimizer stay as they are.
    """
    found = list(_weights(engine))
    watcher = _Watcher(engine, batches)
    with contextlib.ExitStack() as looking:
        looking.enter_context(engine.runner.hooked(watcher))
        walks = [stage.walk for stage in engine.stages.values() if stage.walk is not None]
        for gradients in {walk.gradients for walk in walks if walk.gradients is not None}:
            looking.enter_context(gradients.looked_at(watcher.see))
        for stage in engine.stages.values():
            for name, module in stage.named_modules():
                if isinstance(module, Block):
                    looking.enter_context(module.uncompiled())
                # the logits of a padded vocabulary are minus infinity; the loss tells of the others
                if name and module is not stage.head:
                    hook = module.register_forward_hook(watcher.hook(name))
                    looking.callback(hook.remove)
        # accumulates only: neither the reduction nor an update follows, so weights stay
        engine.accumulate(step, batches, engine.stopwatch())
    engine.buffer.gradients.zero_()
    found += watcher.found
    everyone = engine.axes.world.all_gather_object(min(found, default=None))
    return min((finding for finding in everyone if finding is not None), default=None)


def _weights(engine: Engine) -> Iterator[Finding]:
    buffer, rank = engine.buffer, engine.axes.world.rank
    # where weights are gathered as they are needed, what a rank holds are its own parts
    gathered = not buffer.portion.shards_weights
    for number, stage in engine.stages.items():
        for place, (name, weight) in enumerate(stage.trained_parameters()):
            held = buffer.own_part(weight.entry)
            kept = (buffer.masters, buffer.weight_parts)
            own = held is None or all(_finite(held.view(parts)) for parts in kept)
            if not (own and (not gathered or _finite(weight))):
                # what came from another rank is its effect, wherever that stands in the order
                depth = (number, place, int(own))
                yield Finding(_WEIGHT, -1, depth, rank, f"weight {name}", ())
    for held in buffer.own_frozen():
        if not _finite(held.view(buffer.idle_parts)):
            # as it was loaded: nothing in training changes it
            yield Finding(_FROZEN, -1, (), rank, f"frozen weight {held.entry.name}", ())
    engine.state.let_go()


class _Watcher(OpHook):
    """Keeps this rank's first output, loss and gradient that is not finite, each with its op."""

    def __init__(self, engine: Engine, batches: Sequence[Batch]) -> None:
        self.engine = engine
        self.samples = [tuple(batch.samples.tolist()) for batch in batches]
        self.found: list[Finding] = []
        self._op: Op | None = None
        self._calls = 0
        self._broken: set[int] = set()

    def begin(self, op: Op) -> None:
        """Outputs are told apart by their op, and in it by their order."""
        self._op, self._calls = op, -1
        self._broken.clear()

    def end(self, op: Op) -> None:
        """Looked at before the gradients are taken out of the buffer."""
        if op.row.gradients:
            self.look_at_gradients(op.stage, op.microbatch)

    def hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def look(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            op = self._op
            if op is None or op.row.keeps != ACTIVATIONS:  # recomputed for the backward pass
                return
            self._calls += 1
            if isinstance(output, Tensor) and not self._has(_OUTPUT) and not _finite(output):
                depth = (op.stage, self._calls)
                self._add(_OUTPUT, op.microbatch, depth, f"output of {name}")

        return look

    def see(self, weight: Parameter) -> None:
        """The gradient of `weight` is about to be reduced: behind that it is every rank's."""
        if not _finite(weight.main_grad):
            self._broken.add(id(weight))

    def look_at_gradients(self, number: int, microbatch: int) -> None:
        stage: Stage = self.engine.stages[number]
        if stage.last and not self._has(_LOSS) and not _finite(stage.losses[microbatch]):
            self._add(_LOSS, microbatch, (number, 0), "loss")
        if self._has(_GRADIENT):
            return
        # backwards: the last layer's gradient leads to the others
        for place, (name, weight) in enumerate(reversed(stage.trained_parameters())):
            # where they are reduced as they arise they are gone by now, and were seen before
            here = not self.engine.buffer.portion.shards_gradients
            if id(weight) in self._broken or (here and not _finite(weight.main_grad)):
                self._add(_GRADIENT, microbatch, (-number, place), f"gradient of {name}")
                return

    def _has(self, kind: int) -> bool:
        return any(finding.kind == kind for finding in self.found)

    def _add(self, kind: int, microbatch: int, depth: tuple[int, int], what: str) -> None:
        engine = self.engine
        number = engine.axes["data"].rank * engine.schedule.microbatches + microbatch
        rank, samples = engine.axes.world.rank, self.samples[microbatch]
        self.found.append(Finding(kind, number, depth, rank, what, samples))


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
