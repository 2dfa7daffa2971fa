"""AdamW on the flat master weights, the learning-rate schedule, clipping and fp16's loss scale."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ptdmpi.config import OptimizerConfig, PrecisionConfig
from ptdmpi.engine.offload import Alike, HostUpdate
from ptdmpi.model.state import Counters, State

# The kinds of state that AdamW keeps of each parameter, by torch's own names for them.
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step `step` (0-based) of `steps`: linear warm-up, then decay to the minimum.

    Step w - 1 of a warm-up of w steps is the first at the full rate. The cosine is written as in
    PyTorch's CosineAnnealingLR (its closed form), so that the two agree to the bit.
    """
    peak, low = optimizer.learning_rate, optimizer.min_learning_rate
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done, whole = step - warmup, max(1, steps - warmup)
    if optimizer.decay == "constant":
        return peak
    if optimizer.decay == "linear":
        return low + (peak - low) * (1 - done / whole)
    return low + (peak - low) * (1 + math.cos(math.pi * done / whole)) / 2


class LossScale:
    """fp16's dynamic loss scale (Micikevicius et al. 2018): halved when a gradient overflows,
    doubled after `window` steps without. 1 and constant for other types. What it counts stands in
    the state's `counters`."""

    def __init__(self, precision: PrecisionConfig, counters: Counters) -> None:
        self.dynamic = precision.scales_loss
        self.window = precision.loss_scale_window
        self.counters = counters
        counters.loss_scale = precision.initial_loss_scale if self.dynamic else 1.0

    @property
    def value(self) -> float:
        return self.counters.loss_scale

    @property
    def can_fall(self) -> bool:
        return self.dynamic and self.value > 1.0

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        counters = self.counters
        counters.good_steps = 0 if overflow else counters.good_steps + 1
        if overflow:
            counters.loss_scale = max(1.0, counters.loss_scale / 2)
        elif counters.good_steps == self.window:
            counters.loss_scale *= 2
            counters.good_steps = 0


class Optimizer:
    """PyTorch's AdamW, fused, on flat tensors: of each unit of the buffer this rank's part, those
    weights that decay and those that do not.

    The masters, the moments and the count of updates are those of `state`. Where these do not stand
    on the device the update is done on the host, and `writes_weights`.
    """

    def __init__(self, config: OptimizerConfig, state: State) -> None:
        self.config, self.state = config, state
        buffer = state.buffer
        self.gradients = buffer.reduced[: len(buffer.units)]
        # Adam's own count
        self._updates = torch.zeros((), dtype=torch.float32, device=buffer.storage.device)
        self._groups = []
        for decays in (True, False):
            ranges = [
                slice(0, buffer.decaying(unit)) if decays else slice(buffer.decaying(unit), None)
                for unit in buffer.units
            ]
            cut = partial(_cut, ranges)
            group = Alike(
                cut(buffer.masters),
                [] if buffer.one_type else cut(buffer.weight_parts),
                cut(self.gradients),
                tuple(cut(state.kinds[kind].parts) for kind in MOMENTS),
                config.weight_decay if decays else 0.0,
            )
            if group.masters:
                self._groups.append(group)
        apart = buffer.storage.apart
        self._host = HostUpdate(buffer.storage, self._groups) if apart else None

    @property
    def writes_weights(self) -> bool:
        """Whether the weights of this rank's part follow with the update itself."""
        return self._host is not None

    def unscale(self, scale: float) -> None:
        """Take fp16's loss scale out of the gradients."""
        if scale != 1.0:
            for gradient in self.gradients:
                gradient.mul_(1.0 / scale)

    def step(self, rate: float, norm: Tensor) -> None:
        """Clip by `norm`, the global norm of the gradients, and update the masters; the weights do
        not follow yet (`State.changed`), or not those of other ranks. Raises OSError where the disk
        fails that has the state.

        The arithmetic of clipping is that of torch.nn.utils.clip_grad_norm_.
        """
        if self.config.clip_norm > 0.0:
            factor = torch.clamp(self.config.clip_norm / (norm + 1e-6), max=1.0)
            for gradient in self.gradients:
                gradient.mul_(factor)
        counters = self.state.counters
        # Adam corrects its moments by its count: ours, which skips and checkpoints know
        self._updates.fill_(counters.updates)
        for group in self._groups if self._host is None else self._host.parts():
            self._update(group, rate)
        counters.updates += 1

    def _update(self, group: Alike, rate: float) -> None:
        # The function below torch.optim.AdamW, for the class loads torch's compiler when it is
        # made: 800 modules, 70 MB and a second of every rank's start.
        first, second = group.moments
        with torch.no_grad():
            adamw(
                group.masters,
                group.gradients,
                first,
                second,
                [],
                # each tensor counts for itself
                [self._updates.clone() for _ in group.masters],
                # one kernel; it rounds the end of a tensor otherwise (`ALIGNMENT`, plan/shape)
                fused=True,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=rate,
                weight_decay=group.decay,
                eps=self.config.eps,
                maximize=False,
            )


def _cut(ranges: Sequence[slice], parts: Sequence[Tensor]) -> list[Tensor]:
    """A range of each part, where there is anything in it."""
    cut = (part[some] for part, some in zip(parts, ranges, strict=True))
    return [part for part in cut if part.numel()]
