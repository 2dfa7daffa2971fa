"""The update of the flat master weights: learning rates, groups of parameters, clipping, and the
loss scale of fp16."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.config import OptimizerConfig, PrecisionConfig, RateGroup, SharedInputError
from ptdmpi.config.mup import learning_rate_factor
from ptdmpi.config.sections import AVERAGE, MOMENTUM, WEIGHTS
from ptdmpi.engine.muon import Matrix, Muon, is_matrix
from ptdmpi.engine.offload import Alike, HostUpdate
from ptdmpi.engine.updates import update, update_in_one_pass
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.parameters import Entry
from ptdmpi.model.state import Counters, Kind, State
from ptdmpi.plan.layer.parts import aligned

# a function that returns the weight decay of a parameter, and the factor of its learning rate
RatesOf = Callable[[Entry], tuple[float, float]]


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (0-based) of `steps`: linear warm-up, then a decay to
    the minimum, or the constant peak rate.

    In a warm-up of w steps, step w - 1 is the first step at the peak rate. The cosine decay uses
    the closed form of PyTorch's CosineAnnealingLR, and yields bitwise the same rates. With "wsd"
    (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, section 4.1) the rate stays at the
    peak, and falls linearly in the last steps (Haegele et al. 2024, arXiv 2405.18392).
    """
    peak = optimizer.learning_rate
    low = optimizer.min_learning_rate
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = step - warmup
    whole = max(1, steps - warmup)
    if optimizer.decay == "wsd":
        whole = optimizer.last_steps(steps)
        done = max(0, step - (steps - whole))
    if optimizer.decay == "constant":
        return peak
    if optimizer.decay in ("linear", "wsd"):
        return low + (peak - low) * (1 - done / whole)
    return low + (peak - low) * (1 + math.cos(math.pi * done / whole)) / 2


class LossScale:
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018): it is halved when a gradient
    overflows, and doubled after `window` steps without overflow. For other data types the loss
    scale is always 1. The loss scale is stored in the state's `counters`."""

    def __init__(self, precision: PrecisionConfig, counters: Counters) -> None:
        self.dynamic = precision.scales_loss
        self.window = precision.loss_scale_window
        self.counters = counters
        counters.loss_scale = precision.initial_loss_scale if self.dynamic else 1.0

    @property
    def value(self) -> float:
        """Return the loss scale, the factor by which the loss is multiplied."""
        return self.counters.loss_scale

    @property
    def can_fall(self) -> bool:
        """Return True if the loss scale can still be reduced."""
        return self.dynamic and self.value > 1.0

    def update(self, overflow: bool) -> None:
        """Halve the loss scale if `overflow` is True, but not below 1. Otherwise double the loss
        scale if this is the `window`-th step without overflow since the last change. Do nothing
        unless the precision is fp16."""
        if not self.dynamic:
            return
        counters = self.counters
        counters.good_steps += 1
        if overflow:
            counters.good_steps = 0
            counters.loss_scale = max(1.0, counters.loss_scale / 2)
        elif counters.good_steps == self.window:
            counters.loss_scale *= 2
            counters.good_steps = 0


class Optimizer:
    """The optimizer that the configuration names. It works on flat tensors: one tensor for each
    shard unit (a group of parameters, see `model.flat`), which contains this rank's part of the
    unit. Parameters with the same weight decay and the same factor of the learning rate form a
    group, and the elements of a group are updated together.

    The master weights, the moments and the number of updates belong to `state`. If these tensors
    are not on the device, the host does the update, and `writes_weights` is True.

    If the run computes kernels of the kind "update" in Triton, AdamW's update is one pass over
    memory, which also clips the gradients, writes the weights, and sets the gradients to zero. In
    three cases separate operations do the update instead: with another optimizer than AdamW, if the
    host does the update, and if replicas may differ. (Data-parallel methods with different replicas
    change the master weights after the update, and use the memory of the gradients.)
    """

    def __init__(
        self,
        config: OptimizerConfig,
        state: State,
        tensor: Communicator | None = None,
        *,
        width_ratio: float = 1.0,
    ) -> None:
        """Prepare the update of `state`. `tensor` is the communicator of the tensor axis, whose
        ranks have slices of Muon's matrices. `width_ratio` is the width of the model divided by the
        base width of muP."""
        self.config = config
        self.state = state
        buffer = state.buffer
        self.gradients = buffer.reduced[: len(buffer.units)]
        # the number of updates; Adam needs it to correct the bias of its moments
        self._updates = torch.zeros((), dtype=torch.float32, device=buffer.storage.device)
        rates = partial(_rates, config, width_ratio)
        self._groups = _alike(config, state, rates)
        apart = buffer.storage.apart
        self._host = HostUpdate(buffer.storage, self._groups) if apart else None
        self._muon = Muon(config, _matrices(config, state, rates), buffer, tensor or OneRank())
        self._in_one_pass = False
        # True between an update that sets the gradients of `_groups` to zero, and the next step
        self._groups_are_zero = False

    def compute_by(self, kernels: Kernels) -> None:
        """From now on, use `kernels` for matrix products. If possible, also use the kernel that
        does AdamW's update in one pass."""
        self._muon.kernels = kernels
        differs = self.state.kinds[WEIGHTS].kept.differs
        able = self.config.has_one_pass and self._host is None and not differs
        self._in_one_pass = able and kernels.by_triton("update")

    @property
    def writes_weights(self) -> bool:
        """Return True if `step` writes not only the master weights, but also this rank's
        weights."""
        return self._host is not None or self._in_one_pass

    def clear(self) -> None:
        """Set the gradients of the buffer to zero before a step. Gradients that the last update has
        set to zero are not written again."""
        left = [self.state.buffer.gradients]
        if self._groups_are_zero:
            parts = [part for group in self._groups for part in group.gradients]
            left = _rest(left[0], parts)
        for part in left:
            part.zero_()
        self._groups_are_zero = False

    def expect(self, scale: float) -> None:
        """Divide the gradients by `scale`. The buffer has the gradients of the mean loss multiplied
        by this factor, which includes the loss scale. If the host does the update, begin to copy
        the inputs of the update from the device."""
        if scale != 1.0:
            for gradient in self.gradients:
                gradient.mul_(1.0 / scale)
        if self._host is not None:
            self._host.expect()

    def step(self, rate: float, norm: float) -> None:
        """Clip the gradients by `norm`, their global norm, and update the master weights.
        `State.changed` copies the master weights to the weights later. If `writes_weights` is True,
        this method already updates this rank's weights, and `State.changed` updates only the
        weights of other ranks. The gradients are undefined afterwards. Raise OSError if the disk
        with the state fails.

        Clipping uses the same arithmetic as torch.nn.utils.clip_grad_norm_.
        """
        factor = 1.0
        if self.config.clip_norm > 0.0 and self.gradients:
            # torch's own function computes the clipping factor on the device, in the type of the
            # gradients; here the host computes the factor in the same type, without waiting for the
            # device
            known = torch.tensor(norm, dtype=self.gradients[0].dtype)
            factor = torch.clamp(self.config.clip_norm / (known + 1e-6), max=1.0).item()
            if factor != 1.0 and self._host is None and not self._in_one_pass:
                torch._foreach_mul_(self.gradients, factor)
        counters = self.state.counters
        self.state.read.computing_waits()
        # Adam corrects the bias of its moments by the number of updates, which `counters` has. This
        # number does not include skipped steps, and is stored in checkpoints.
        if self._in_one_pass:
            for group in self._groups:
                update_in_one_pass(self.config, group, rate, counters.updates, factor=factor)
            self._groups_are_zero = True
        else:
            self._updates.fill_(counters.updates)
            for group in self._groups if self._host is None else self._host.parts(factor):
                update(self.config, group, rate, self._updates)
            self._muon.step(rate)
        counters.updates += 1


def _alike(config: OptimizerConfig, state: State, rates_of: RatesOf) -> list[Alike]:
    """Divide this rank's part of the state, except the matrices that Muon updates, into groups, and
    return the groups. All elements of a group are updated by the same rule. `rates_of` returns the
    weight decay of a parameter and the factor of its learning rate."""
    buffer = state.buffer
    by_rates = dict[tuple[float, float], list[_Range]]()
    for alike, some in _ranges(config, buffer, rates_of):
        by_rates.setdefault(alike, []).append(some)
    kinds = [state.kinds[kind] for kind in config.moments]
    groups = []
    for (decay, share), ranges in by_rates.items():
        cut = partial(_cut, ranges)
        groups.append(
            Alike(
                masters=cut(buffer.masters),
                weights=[] if buffer.one_type else cut(buffer.weight_parts),
                gradients=cut(buffer.reduced),
                moments=tuple(
                    [some.of(kind) for some in ranges]
                    for kind in kinds
                    if kind.kept.names is None or ranges[0].name in kind.kept.names
                ),
                decay=decay,
                share=share,
            )
        )
    return groups


class _Range(NamedTuple):
    """A range of elements in this rank's part of a shard unit; `unit` is the number of the shard
    unit. `name` is the name of the first parameter in the range."""

    unit: int
    some: slice
    name: str

    def of(self, kind: Kind) -> Tensor:
        """Return the elements of this range in the state `kind`, which may exist for only some of
        the parameters."""
        begin = self.some.start
        if kind.kept.names is not None:
            begin = kind.held[self.name].offset
        return kind.parts[self.unit][begin : begin + self.some.stop - self.some.start]


def _ranges(
    config: OptimizerConfig, buffer: ParameterBuffer, rates_of: RatesOf
) -> Iterator[tuple[tuple[float, float], _Range]]:
    """Yield ((weight decay, factor of the learning rate), range) for this rank's part of each shard
    unit. A range consists of neighbouring parameters with the same weight decay and the same
    factor, including their padding.
    """

    def alike(own: OwnPart) -> tuple[int, tuple[float, float] | None]:
        """Return (number of the shard unit, (weight decay, factor of the learning rate)) for a
        parameter's part. For a matrix that Muon updates, the second value is None."""
        if is_matrix(config, own.entry):
            return own.unit, None
        return own.unit, rates_of(own.entry)

    for (unit, rates), some in itertools.groupby(buffer.own_parts(), alike):
        parts = list(some)
        first = parts[0]
        last = parts[-1]
        if rates is not None:
            stop = last.offset + aligned(last.length)
            yield rates, _Range(unit, slice(first.offset, stop), first.entry.name)


def _rates(config: OptimizerConfig, width_ratio: float, entry: Entry) -> tuple[float, float]:
    """Return the weight decay of a parameter, and the factor by which its learning rate is
    multiplied. In every update, the weight decay is multiplied by the learning rate of the
    parameter, which includes muP's factor. The weight decay is divided by this factor here, so that
    muP does not change how much a step decays the weights."""
    group = group_of(config, entry.name)
    in_layers = entry.name.startswith("layers.") and len(entry.declaration.shape) == 2
    by_width = 1.0
    if width_ratio != 1.0:
        by_width = learning_rate_factor(config, width_ratio, in_layers=in_layers)
    decay = config.weight_decay * group.weight_decay_factor * entry.declaration.decay
    return decay / by_width, group.learning_rate_factor * by_width


def _matrices(config: OptimizerConfig, state: State, rates_of: RatesOf) -> list[Matrix]:
    """Return this rank's parts of the matrices that Muon updates, in the order of the flat
    buffer."""
    buffer = state.buffer
    matrices = list[Matrix]()
    for own in buffer.own_parts():
        entry = own.entry
        if is_matrix(config, entry):
            master, gradient = (own.view(flat) for flat in (buffer.masters, buffer.reduced))
            kinds = (MOMENTUM, AVERAGE) if config.ema_decay else (MOMENTUM,)
            moments = [state.view(kind, entry.name) for kind in kinds]
            matrices.append(Matrix(own, master, gradient, moments, *rates_of(entry)))
    return matrices


def require_groups(
    config: OptimizerConfig, parameters: Communicator, buffer: ParameterBuffer
) -> None:
    """Raise SharedInputError, on every rank, if a name pattern of `optimizer.groups` matches no
    parameter that trains. `parameters` is the group of ranks that together have all parameters of
    the model."""
    globs = sorted({glob for group in config.groups for glob in group.names})
    if not globs:
        return
    here = [any(fnmatchcase(name, glob) for name in buffer.entries) for glob in globs]
    named_anywhere = [any(ranks) for ranks in zip(*parameters.all_gather_object(here), strict=True)]
    for glob, names_any in zip(globs, named_anywhere, strict=True):
        if not names_any:
            raise SharedInputError(
                f'optimizer.groups: names = ["{glob}"] matches no parameter that trains; '
                "legal: patterns of names such as layers.0.mlp.up.weight; * matches any text"
            )


def group_of(config: OptimizerConfig, name: str) -> RateGroup:
    """Return the first group of `optimizer.groups` that contains the parameter `name`. If no group
    contains it, return a group whose factors are 1."""
    for group in config.groups:
        if any(fnmatchcase(name, glob) for glob in group.names):
            return group
    return RateGroup(names=("*",))


def _rest(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the elements of the flat tensor `whole` that are not in `parts`. `parts` are
    views of `whole` that do not overlap."""
    rest, end = list[Tensor](), 0
    for part in sorted(parts, key=Tensor.storage_offset):
        start = int(part.storage_offset() - whole.storage_offset())
        rest.append(whole[end:start])
        end = start + len(part)
    return [part for part in (*rest, whole[end:]) if len(part)]


def _cut(ranges: Sequence[_Range], parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of `ranges` as one tensor for each range; `parts` has one tensor for each
    shard unit."""
    return [parts[piece.unit][piece.some] for piece in ranges]
