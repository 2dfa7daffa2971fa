"""Losses and gradients that are not finite: the search for their origin, and the limit on skipped
steps.

Every step tests only the loss and the global gradient norm, which every step computes in any case.
If one of them is not finite, the step updates neither the weights nor the optimizer state. At this
time, the reductions over ranks have already spread the value that is not finite to all ranks. To
find the origin of this value, the step is computed a second time, and every output is tested.
Dropout masks depend only on the seed, the step and the samples, so the second computation gives the
same values as the first.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from ptdmpi.engine.engine import Engine
from ptdmpi.engine.prepare.compiling import is_compiled
from ptdmpi.engine.result import StepResult
from ptdmpi.engine.runner import OpHook
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.stage import Stage
from ptdmpi.model.transformer import Block
from ptdmpi.plan.schedule.ops import ACTIVATIONS, Op

FAILED_EXIT_CODE = 1


class ValueKind(IntEnum):
    """The kinds of values that can be NaN or infinite, ordered from cause to effect: a value of one
    kind can cause NaN or infinite values of later kinds."""

    FROZEN_WEIGHT = 0
    WEIGHT = 1
    OUTPUT = 2
    LOSS = 3
    GRADIENT = 4


@dataclass(frozen=True, order=True)
class Finding:
    """A value that is not finite. Findings are ordered from cause to effect.

    `microbatch` is the number of the microbatch within the global batch, or -1 for weights. `depth`
    is the position of the value in the order of computation: the number of the pipeline stage, then
    the position in the stage. `samples` are the numbers of the samples in the microbatch. `what` is
    a description of the value for messages.
    """

    kind: ValueKind
    microbatch: int
    depth: tuple[int, ...]
    rank: int
    what: str
    samples: tuple[int, ...]


class Skips:
    """A counter of consecutive steps that were skipped because a value was not finite.

    A step that is skipped because of an overflow in fp16 is not counted, as long as the loss scale
    can still be reduced.
    """

    def __init__(
        self,
        engine: Engine,
        names: Callable[[int], str],
        max_skips: int,
        say: Callable[[str], None],
    ) -> None:
        """Start the count of skipped steps at 0. `names(rank)` returns the name of a rank for
        messages, and `say` prints a line.
        """
        self.engine = engine
        self.names = names
        self.max_skips = max_skips
        self.say = say
        self.in_a_row = 0

    def after(self, step: int, result: StepResult, batches: Sequence[Microbatch]) -> None:
        """If step `step` (counted from 0) was skipped, count it and print the origin of the value
        that is not finite. `batches` are the microbatches of the step. Every rank must call this
        method.

        Raises SystemExit (1) on every rank after more than `max_skips` skipped steps in a row. If a
        weight is not finite, SystemExit is raised at once, because no later step can repair this
        weight, and it must not be saved in a checkpoint.
        """
        if not result.skipped:
            self.in_a_row = 0
        if not result.skipped or result.overflow:
            return
        self.in_a_row += 1
        finding = examine(self.engine, step, batches)
        where, samples = self._explained(finding, batches)
        count = f"{self.in_a_row} in a row, at most {self.max_skips}"
        self.say(
            f"step {step + 1} skipped ({count}): loss {result.loss}, grad norm {result.grad_norm}; "
            f"{where}; samples {samples}"
        )
        if finding is not None and finding.kind <= ValueKind.WEIGHT:
            reason = "a weight is not finite; the same command continues from the last checkpoint"
            if finding.kind == ValueKind.FROZEN_WEIGHT:
                reason = "adapt.base has a weight that is not finite; legal: an undamaged model"
            self.say(f"stopped: {reason}")
            raise SystemExit(FAILED_EXIT_CODE)
        if self.in_a_row > self.max_skips:
            self.say(f"stopped: more than run.max_skips = {self.max_skips} steps were skipped")
            raise SystemExit(FAILED_EXIT_CODE)

    def _explained(self, finding: Finding | None, batches: Sequence[Microbatch]) -> tuple[str, str]:
        """Return two texts: where the value that is not finite was found, and the numbers of the
        samples that may have caused it."""
        if finding is None:
            where = "not finite once, finite when computed again: a fault of the hardware is likely"
            # the second computation uses uncompiled layers, which round differently
            if is_compiled(self.engine.stages):
                where = "not finite as compiled, finite when computed again by uncompiled layers"
        else:
            where = f"{finding.what} on {self.names(finding.rank)} is not finite"
            if finding.samples:
                where += f", microbatch {finding.microbatch} of the batch"
                return where, ", ".join(map(str, finding.samples))
        # only rank 0 prints this text, and the first microbatch of rank 0 begins with the first
        # sample of the step
        first = int(batches[0].samples[0])
        return where, f"{first} to {first + self.engine.config.batch.global_size - 1}"


def examine(engine: Engine, step: int, batches: Sequence[Microbatch]) -> Finding | None:
    """Compute the training step `step` again. Return the first value that is not finite, in the
    order from cause to effect (see `Finding`).

    Every rank must call this function, and all get the same result. Return None if all values are
    finite in the second computation. The function sets the gradients to zero, and does not change
    the weights and the optimizer state.
    """
    findings = list(_weights(engine))
    watcher = _Watcher(engine, batches)
    with contextlib.ExitStack() as watching:
        watching.enter_context(engine.runner.hooked(watcher))
        walks = [stage.walk for stage in engine.stages.values() if stage.walk is not None]
        for gradients in {walk.gradients for walk in walks if walk.gradients is not None}:
            watching.enter_context(gradients.looked_at(watcher.see))
        for stage in engine.stages.values():
            for name, module in stage.named_modules():
                if isinstance(module, Block):
                    watching.enter_context(module.uncompiled())
                # Do not test the output of the head, because the logits of padded vocabulary
                # entries are minus infinity. The loss is tested instead.
                if name and name != "head":
                    hook = module.register_forward_hook(watcher.hook(name))
                    watching.callback(hook.remove)
        # `accumulate` computes gradients, but neither reduces them nor updates the weights
        engine.accumulate(step, batches, engine.stopwatch())
    engine.buffer.gradients.zero_()
    findings += watcher.findings
    everyone = engine.axes.world.all_gather_object(min(findings, default=None))
    return min((finding for finding in everyone if finding is not None), default=None)


def _weights(engine: Engine) -> Iterator[Finding]:
    """Yield this rank's weights that are not finite."""
    buffer = engine.buffer
    rank = engine.axes.world.rank
    # with ZeRO stage 3 a rank has only its own shards of the weights
    holds_whole = not buffer.portion.shards_weights
    for number, stage in engine.stages.items():
        for place, (name, weight) in enumerate(stage.trained_parameters()):
            held = buffer.own_part(weight.entry)
            kept = (buffer.masters, buffer.weight_parts)
            own = held is None or all(_finite(held.view(parts)) for parts in kept)
            if not (own and (not holds_whole or _finite(weight))):
                # If `own` is True, this rank's own shard is finite, and the value comes from the
                # shard of another rank. The finding of that rank must come first in the order, so
                # this finding gets a greater `depth`.
                depth = (number, place, int(own))
                yield Finding(
                    kind=ValueKind.WEIGHT,
                    microbatch=-1,
                    depth=depth,
                    rank=rank,
                    what=f"weight {name}",
                    samples=(),
                )
    for held in buffer.own_frozen():
        if not _finite(held.view(buffer.idle_parts)):
            # training does not change a frozen weight, so it was not finite when it was loaded
            name = f"frozen weight {held.entry.name}"
            yield Finding(
                kind=ValueKind.FROZEN_WEIGHT,
                microbatch=-1,
                depth=(),
                rank=rank,
                what=name,
                samples=(),
            )
    engine.state.let_go()


class _Watcher(OpHook):
    """An observer of this rank's computation. It stores the first output, the first loss and the
    first gradient that are not finite.
    """

    def __init__(self, engine: Engine, batches: Sequence[Microbatch]) -> None:
        self.engine = engine
        self.samples = [tuple(batch.samples.tolist()) for batch in batches]
        self.findings: list[Finding] = []
        self._op: Op | None = None
        self._calls = -1  # number of the last output within the present op.
        # Ids of the weights whose gradients are not finite in the present op.
        self._broken: set[int] = set()

    def begin(self, op: Op) -> None:
        """Record that the rank begins to compute `op`. The outputs of the op are counted from 0, so
        that each output is identified by its op and its number."""
        self._op = op
        self._calls = -1
        self._broken.clear()

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """Test the loss and the gradients of an op, before the gradients are freed."""
        if op.row.gradients:
            self.look_at_gradients(op.stage, microbatch)

    def hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        """Return a forward hook that tests the outputs of the module `name`."""

        def look(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            """Test an output of the forward pass."""
            op = self._op
            # Outside a forward op, the output is recomputed for the backward pass. It was already
            # tested in the forward op.
            if op is None or op.row.keeps != ACTIVATIONS:
                return
            self._calls += 1
            if (
                isinstance(output, Tensor)
                and not self._has(ValueKind.OUTPUT)
                and not _finite(output)
            ):
                depth = (op.stage, self._calls)
                self._add(ValueKind.OUTPUT, op.microbatch, depth, f"output of {name}")

        return look

    def see(self, weight: Parameter) -> None:
        """Test the gradient of `weight` before it is reduced, because the reduction would spread a
        value that is not finite to all ranks."""
        if not _finite(weight.main_grad):
            self._broken.add(id(weight))

    def look_at_gradients(self, number: int, microbatch: MicrobatchPass) -> None:
        """Test the loss and the gradients of a backward pass through stage `number`."""
        stage: Stage = self.engine.stages[number]
        if stage.last and not self._has(ValueKind.LOSS):
            assert microbatch.total is not None, "the last stage computes the total loss"
            if not _finite(microbatch.total):
                self._add(ValueKind.LOSS, microbatch.number, (number, 0), "loss")
        if self._has(ValueKind.GRADIENT):
            return
        # with ZeRO stages 2 and 3, `see` has tested each gradient when it was computed, and the
        # unreduced gradient is already freed
        still_here = not self.engine.buffer.portion.shards_gradients
        # begin with the last layer, because the backward pass computes its gradients first
        for place, (name, weight) in enumerate(reversed(stage.trained_parameters())):
            if id(weight) in self._broken or (still_here and not _finite(weight.main_grad)):
                what = f"gradient of {name}"
                self._add(ValueKind.GRADIENT, microbatch.number, (-number, place), what)
                return

    def _has(self, kind: ValueKind) -> bool:
        return any(finding.kind == kind for finding in self.findings)

    def _add(self, kind: ValueKind, microbatch: int, depth: tuple[int, int], what: str) -> None:
        engine = self.engine
        number = engine.axes["data"].rank * engine.schedule.microbatches + microbatch
        rank = engine.axes.world.rank
        self.findings.append(
            Finding(
                kind=kind,
                microbatch=number,
                depth=depth,
                rank=rank,
                what=what,
                samples=self.samples[microbatch],
            )
        )


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
