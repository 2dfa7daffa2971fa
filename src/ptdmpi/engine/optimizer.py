"""AdamW on the flat master weights, the learning-rate schedule, clipping and fp16's loss scale."""

import math

import torch
from torch import Tensor

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


class Optimizer:
    """PyTorch's AdamW, fused, on two flat tensors: weights that decay and weights that do not.

    The masters, the moments and the count of updates are those of `state`.
    """

    def __init__(self, config: OptimizerConfig, state: State) -> None:
        self.config, self.state = config, state
        self.buffer = buffer = state.buffer
        boundary, end = buffer.decay_size, buffer.master.numel()
        decays = ((slice(0, boundary), config.weight_decay), (slice(boundary, end), 0.0))
        groups = []
        kept = {}
        for part, decay in decays:
            tensor = torch.nn.Parameter(buffer.master[part])
            tensor.grad = buffer.gradients[part]
            groups.append({"params": [tensor], "weight_decay": decay})
            kept[tensor] = {kind: state.kinds[kind].flat[part] for kind in MOMENTS}
        self.adam = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            # one kernel; it rounds the end of a tensor otherwise (`ALIGNMENT`, model/parameters.py)
            fused=True,
        )
        self._steps: list[Tensor] = []  # Adam's own count, one for each of its tensors
        for tensor, moments in kept.items():
            self._steps.append(torch.zeros((), dtype=torch.float32, device=tensor.device))
            self.adam.state[tensor] = {"step": self._steps[-1], **moments}

    def step(self, rate: float, norm: Tensor) -> None:
        """Clip by `norm`, the global norm of the gradients, and update.

        The arithmetic of clipping is that of torch.nn.utils.clip_grad_norm_.
        """
        if self.config.clip_norm > 0.0:
            factor = torch.clamp(self.config.clip_norm / (norm + 1e-6), max=1.0)
            self.buffer.gradients.mul_(factor)
        for group in self.adam.param_groups:
            group["lr"] = rate
        counters = self.state.counters
        # Adam corrects its moments by its count: ours, which skips and checkpoints know
        for steps in self._steps:
            steps.fill_(counters.updates)
        self.adam.step()
        counters.updates += 1
        self.state.changed()
