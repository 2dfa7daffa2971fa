"""AdamW on the flat master weights, the learning-rate schedule, clipping and fp16's loss scale."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ptdmpi.config import OptimizerConfig, PrecisionConfig
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


class _Part(NamedTuple):
    """A flat part of the masters that decays alike, its gradients, and Adam's state of it."""

    masters: Tensor
    gradients: Tensor
    moments: tuple[Tensor, ...]  # in the order of MOMENTS
    updates: Tensor  # Adam's own count
    decay: float


class Optimizer:
    """PyTorch's AdamW, fused, on two flat tensors: weights that decay and weights that do not.

    The masters, the moments and the count of updates are those of `state`.
    """

    def __init__(self, config: OptimizerConfig, state: State) -> None:
        self.config, self.state = config, state
        self.buffer = buffer = state.buffer
        boundary, end = buffer.decay_size, buffer.master.numel()
        decays = ((slice(0, boundary), config.weight_decay), (slice(boundary, end), 0.0))
        self._parts = [
            _Part(
                buffer.master[part],
                buffer.gradients[part],
                tuple(state.kinds[kind].flat[part] for kind in MOMENTS),
                torch.zeros((), dtype=torch.float32, device=buffer.master.device),
                decay,
            )
            for part, decay in decays
        ]

    def step(self, rate: float, norm: Tensor) -> None:
        """Clip by `norm`, the global norm of the gradients, and update.

        The arithmetic of clipping is that of torch.nn.utils.clip_grad_norm_.
        """
        if self.config.clip_norm > 0.0:
            factor = torch.clamp(self.config.clip_norm / (norm + 1e-6), max=1.0)
            self.buffer.gradients.mul_(factor)
        counters = self.state.counters
        for part in self._parts:
            # Adam corrects its moments by its count: ours, which skips and checkpoints know
            part.updates.fill_(counters.updates)
            self._update(part, rate)
        counters.updates += 1
        self.state.changed()

    def _update(self, part: _Part, rate: float) -> None:
        # The function below torch.optim.AdamW, for the class loads torch's compiler when it is
        # made: 800 modules, 70 MB and a second of every rank's start.
        first, second = part.moments
        with torch.no_grad():
            adamw(
                [part.masters],
                [part.gradients],
                [first],
                [second],
                [],
                [part.updates],
                # one kernel; it rounds the end of a tensor otherwise (`ALIGNMENT`, parameters.py)
                fused=True,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=rate,
                weight_decay=part.decay,
                eps=self.config.eps,
                maximize=False,
            )
