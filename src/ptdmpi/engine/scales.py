"""Delayed scales (`precision.fp8 = "delayed"`) for products in 8-bit floating point: the scale of
an operand (input, weight or output gradient of a linear) is computed from its magnitudes in earlier
steps.

Once per step, all ranks agree on the greatest magnitude of each operand of each linear, over all
ranks and all microbatches. The scales are therefore the same in every layout, unless a layout
rounds the operands differently. Every rank stores, for each linear of the model, the exponents of
the greatest magnitudes of the last steps (in `Counters`), so that a run may resume in another
layout.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ptdmpi.comm.queues import on_its_way
from ptdmpi.comm.world import Axes
from ptdmpi.config import ModelConfig
from ptdmpi.model.kernels.delayed import KINDS
from ptdmpi.model.low_bit.delayed import OPERANDS, DelayedScales, Operand, chosen, extended
from ptdmpi.model.low_bit.float8 import exponents
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import State
from ptdmpi.model.tensor_parallel import LayerLinear
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.layout.grid import LOSSES, TENSOR
from ptdmpi.plan.shape import parameters


class ScaleHistory:
    """The delayed scales of all linears of a model. All methods do nothing if the model has no
    delayed scales."""

    def __init__(
        self, model: ModelConfig, axes: Axes, stages: Mapping[int, Stage], state: State
    ) -> None:
        """Find the linears of `stages` that have delayed scales."""
        self.axes = axes
        self.state = state
        # the names of all operands of the model, on every rank; the index of a name is the row of
        # its operand in the tensor of greatest magnitudes
        self.names = list(_names(model)) if model.scaling == "delayed" else []
        self._rows = {name: row for row, name in enumerate(self.names)}
        self._mine: dict[str, DelayedScales] = {}
        for stage in stages.values() if self.names else ():
            for name, module in stage.named_modules():
                if isinstance(module, LayerLinear) and module.scaling == "delayed":
                    self._mine[name] = module.delayed

    def begin(self) -> None:
        """Set the scales of each linear of this rank. The scales are computed from the exponents
        that the state stores."""
        histories = self.state.counters.exponents
        for name, scales in self._mine.items():
            known: dict[Operand, int] = {}
            for operand in OPERANDS:
                history = histories.get(f"{name}.{operand}", ())
                if history:
                    known[operand] = chosen(history)
            scales.begin(known)

    def sent(self) -> Tensor | None:
        """Begin to copy the greatest magnitude of each operand in this step, over all ranks, to the
        host: [operands] float32. The copy is complete after `Axes.settle`. Return None without
        delayed scales. Every rank calls this method."""
        if not self.names:
            return None
        seen = {
            self._rows[f"{name}.{operand}"]: greatest
            for name, scales in self._mine.items()
            for operand, greatest in scales.seen.items()
        }
        zero = torch.zeros((), dtype=torch.bfloat16, device=self.state.buffer.device)
        every = torch.stack([seen.get(row, zero) for row in range(len(self.names))]).float()
        # these groups together reach all ranks; a rank without an operand has a zero, which does
        # not change the maximum
        for group in (LOSSES, TENSOR, "pipeline"):
            self.axes[group].all_reduce(every, "max")
        return on_its_way(every)

    def update(self, sent: Tensor | None) -> None:
        """Compute the exponent of each operand from its greatest magnitude in this step, and append
        the exponent to the operand's history in the state. `sent` is the result of the method
        `sent`: the greatest magnitudes of all operands."""
        if sent is None:
            return
        of_type = {kind: exponents(sent, kind).tolist() for kind in set(KINDS.values())}
        before = self.state.counters.exponents
        after = {}
        for name, row in self._rows.items():
            kind = KINDS[OPERANDS[row % len(OPERANDS)]]
            history = extended(before.get(name, ()), of_type[kind][row])
            if history:
                after[name] = history
        # make a new mapping, because a checkpoint in progress may refer to the old one
        self.state.counters.exponents = after


def _names(model: ModelConfig) -> Iterator[str]:
    """Yield the names of the operands of all linears, such as "layers.0.mlp.up.input". For each
    linear, the operands are in the order of `OPERANDS`."""
    for number in range(model.layers):
        for name, part in parameters.layer(model, model.kind_of(number)).items():
            if isinstance(part, Linear):
                for operand in OPERANDS:
                    yield f"layers.{number}.{name}.{operand}"
