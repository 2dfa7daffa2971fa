"""Compared models with experts. The choices of experts are recorded in one training run and
replayed in another run.

If two scores of a router are almost equal, a rounding error may change the choice of experts. Two
layouts then compute different functions, and their losses differ by more than rounding. So a
training run in float32 replays the choices of the run on one rank, and counts the choices that it
would have made differently (`flips`). In float64 no choice may differ.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ptdmpi.engine.engine import Engine
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.experts.routing import Routing
from ptdmpi.model.experts.tokens import TensorTokens
from ptdmpi.parity.layouts import (
    GLOBAL_SIZE,
    HIDDEN,
    MOST_RANKS,
    SEQ_LENGTH,
    Case,
    ComparedLayout,
    ComparedModel,
    legal,
)

EXPERTS = 4
CHOSEN = 2  # experts of a token
COEFFICIENTS = {"bias": 0.001, "batch": 0.02, "sequence": 0.02}
# (step, layer) -> numbers of the experts of each token [GLOBAL_SIZE, SEQ_LENGTH, CHOSEN]
Choices = dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class MixtureModel(ComparedModel):
    """A model whose layers have experts, and whose experts are balanced by the method `balance`."""

    balance: str = "bias"

    @property
    def keys(self) -> dict[str, Any]:
        """Return the settings (key -> value) of the configuration section [model] that describe the
        compared model."""
        return {
            **super().keys,
            "experts": EXPERTS,
            "experts_per_token": CHOSEN,
            "expert_hidden": HIDDEN,
            "shared_experts": 1,
            "balance": self.balance,
            "balance_coefficient": COEFFICIENTS[self.balance],
        }


def mixture_cases(ranks: int = MOST_RANKS) -> list[Case]:
    """Return cases with experts that are distributed over ranks.

    In the first case and in the case with context parallelism, each rank has one microbatch, and
    each expert computes the tokens of each source rank separately (`Layout.computes_by_source`).
    Therefore the results must have the same bits as without distributed experts. The other cases
    add tensor parallelism with recomputation, ZeRO 3, several chunks per rank, and experts that the
    tensor axis does not divide.
    """
    model = MixtureModel("llama", layers=4)
    cases = [
        Case(ComparedLayout(data=2, expert=2, micro_size=GLOBAL_SIZE // 2), model),
        Case(
            ComparedLayout(
                tensor=2,
                data=2,
                expert=2,
                sequence_parallel=True,
                recompute="full",
                micro_size=2,
            ),
            replace(model, balance="batch"),
        ),
        Case(
            ComparedLayout(data=4, expert=2, zero=3, micro_size=2),
            replace(model, balance="sequence"),
        ),
        Case(
            ComparedLayout(
                pipeline=2, virtual=2, data=2, expert=2, schedule="interleaved", micro_size=4
            ),
            replace(model, dropout=True, documents=True),
        ),
        Case(
            ComparedLayout(context=2, data=2, expert=4, micro_size=GLOBAL_SIZE // 2),
            replace(model, documents=True),
        ),
        Case(
            ComparedLayout(
                tensor=2, data=2, expert=4, expert_tensor=1, sequence_parallel=True, micro_size=4
            ),
            replace(model, balance="sequence"),
        ),
    ]
    return legal(cases, ranks)


class Chooser:
    """The choices of experts in a training run. `expected` has the choices of another run. If
    `replaces` is True, the run uses these choices; otherwise it uses its own choices.

    `recorded` has the run's own choices, for the tokens of this rank. `flips` counts the tokens
    whose experts differ from `expected`, in all layers and steps; the order of a token's experts
    does not matter. Tensor ranks with the same tokens count a flip only once. Without `expected` no
    flip is counted.
    """

    def __init__(
        self, engine: Engine, expected: Choices | None = None, *, replaces: bool = False
    ) -> None:
        """Record the choices of all routers of `engine` from now on."""
        self.expected = expected
        self.replaces = replaces
        self.recorded: Choices = {}
        self.flips = 0
        self._positions = engine.context.positions
        self._step = 0
        self._batches: Sequence[Microbatch] = ()
        self._done = Counter[int]()
        for stage in engine.stages.values():
            for layer, mixture in stage.mixtures.items():
                mixture.routing = _WatchedRouting(
                    mixture.routing.model, layer, self, mixture.tokens
                )

    def begin(self, step: int, batches: Sequence[Microbatch]) -> None:
        """Prepare to record step `step`, which trains on `batches`. The batches have only this
        rank's positions."""
        self._step, self._batches = step, batches
        self._done.clear()

    def choice(self, layer: int, own: Tensor, tokens: TensorTokens) -> Tensor:
        """Return the experts of the tokens of the layer's next microbatch, [T, k] for T tokens with
        k experts each. `own` [T, k] has the experts that the layer itself has chosen. Every layer
        computes the microbatches of a step in their order. `tokens` says which of the tokens this
        tensor rank routes, and whether it counts the choices that differ from the expected choices
        (flips)."""
        batch = self._batches[self._done[layer]]
        self._done[layer] += 1
        samples = batch.samples - self._step * GLOBAL_SIZE
        positions = tokens.own_positions(self._positions.numbers(len(batch.inputs), own.device))
        # the tokens of the microbatch are in the order [position, sample]
        place = (samples[None, :], positions[:, None])
        shape = (GLOBAL_SIZE, SEQ_LENGTH, own.shape[1])
        record = self.recorded.setdefault((self._step, layer), own.new_zeros(shape))
        record[place] = own.unflatten(0, (len(positions), len(samples)))
        if self.expected is None:
            return own
        theirs = self.expected[self._step, layer][place].flatten(0, 1)
        if tokens.first:
            differ = own.sort(-1).values != theirs.sort(-1).values
            self.flips += int(differ.any(-1).sum())
        return theirs if self.replaces else own


@dataclass(frozen=True)
class _WatchedRouting(Routing):
    """The routing of one layer, whose choices pass through a `Chooser`."""

    layer: int
    chooser: Chooser
    tokens: TensorTokens

    def choose(self, scores: Tensor, balance: Tensor | None = None) -> Tensor:
        """Return the experts of each token, [T, k] for T tokens with k experts each."""
        own = super().choose(scores, balance)
        return self.chooser.choice(self.layer, own, self.tokens)
