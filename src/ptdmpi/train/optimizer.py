"""AdamW on the flat master weights, the learning-rate schedule, clipping and fp16's loss scale."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ptdmpi.config import OptimizerConfig, PrecisionConfig
from ptdmpi.model.parameters import Entry, ParameterBuffer


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
    doubled after `window` steps without. 1 and constant for other types."""

    def __init__(self, precision: PrecisionConfig) -> None:
        self.dynamic = precision.compute == "fp16"
        self.window = precision.loss_scale_window
        self.value = precision.initial_loss_scale if self.dynamic else 1.0
        self.good_steps = 0

    @property
    def can_fall(self) -> bool:
        return self.dynamic and self.value > 1.0

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self.window:
            self.value *= 2
            self.good_steps = 0


class Optimizer:
    """PyTorch's AdamW, fused, on two flat tensors: weights that decay and weights that do not."""

    def __init__(self, config: OptimizerConfig, buffer: ParameterBuffer) -> None:
        self.config = config
        self.buffer = buffer
        boundary, end = buffer.decay_size, buffer.master.numel()
        decays = ((slice(0, boundary), config.weight_decay), (slice(boundary, end), 0.0))
        groups = []
        self.flat: list[tuple[slice, torch.nn.Parameter]] = []
        for part, decay in decays:
            tensor = torch.nn.Parameter(buffer.master[part])
            tensor.grad = buffer.gradients[part]
            self.flat.append((part, tensor))
            groups.append({"params": [tensor], "weight_decay": decay})
        self.adam = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for _, tensor in self.flat:
            self.adam.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    @property
    def updates(self) -> int:
        """Updates made so far; skipped steps do not count."""
        return int(self.adam.state[self.flat[0][1]]["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for _, tensor in self.flat:
            self.adam.state[tensor]["step"].fill_(count)

    def moment(self, kind: str, entry: Entry) -> Tensor:
        """The "exp_avg" or "exp_avg_sq" of one parameter, a view in its local shape."""
        for part, tensor in self.flat:
            if part.start <= entry.start < part.stop:
                return replace(entry, start=entry.start - part.start).view(
                    self.adam.state[tensor][kind]
                )
        raise KeyError(entry.name)

    def step(self, rate: float, norm: Tensor) -> None:
        """Clip by `norm`, the global norm of the gradients, and update.

        The arithmetic of clipping is that of torch.nn.utils.clip_grad_norm_.
        """
        if self.config.clip_norm > 0.0:
            factor = torch.clamp(self.config.clip_norm / (norm + 1e-6), max=1.0)
            self.buffer.gradients.mul_(factor)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.buffer.refresh_weights()
