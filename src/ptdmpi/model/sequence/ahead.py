"""The tokens of a microbatch that modules for multi-token prediction read and predict."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.model.documents import Documents
from ptdmpi.model.sequence.positions import Positions


@dataclass(frozen=True)
class TokensAhead:
    """The tokens that `m` modules for multi-token prediction use, for b sequences of s positions.
    `ids` int64 [m + 1, s, b]: `ids[k]` has, at position i, the token i + 1 + k. Module k reads
    `ids[k]` and predicts `ids[k + 1]`. `weights` float32 [m, s, b] are the weights of the
    predictions: 0 where the predicted token is after the end of the sample, or is in another
    document. `counts[k]` is the sum of the weights of module k's predictions.
    """

    ids: Tensor
    weights: Tensor
    counts: tuple[float, ...]

    @classmethod
    def of(
        cls, labels: Tensor, weights: Tensor | None, documents: Documents | None, modules: int
    ) -> "TokensAhead":
        """Return the tokens for `modules` modules. `labels` and `weights` [s, b] are those of a
        microbatch at all positions of its sequences."""
        if weights is None:
            weights = torch.ones(labels.shape)
        numbers = torch.zeros_like(labels) if documents is None else documents.numbers.t()
        ids, counted = [labels], []
        for ahead in range(1, modules + 1):
            same = numbers[ahead:] == numbers[:-ahead]
            ids.append(_filled(labels[ahead:], len(labels)))
            counted.append(_filled(weights[ahead:] * same, len(labels)))
        return cls._counted(torch.stack(ids), torch.stack(counted))

    @classmethod
    def _counted(cls, ids: Tensor, weights: Tensor) -> "TokensAhead":
        counts: list[float] = weights.double().sum((1, 2)).tolist()
        return cls(ids, weights, tuple(counts))

    def at(self, positions: Positions) -> "TokensAhead":
        """Return the same tokens, with only some `positions` of the sequences."""
        ids, weights = (positions.of(x, dim=1).contiguous() for x in (self.ids, self.weights))
        return self._counted(ids, weights)

    def each(self, change: Callable[[Tensor], Tensor]) -> "TokensAhead":
        """Return the same tokens with `change` applied to both tensors."""
        return replace(self, ids=change(self.ids), weights=change(self.weights))


def _filled(x: Tensor, length: int) -> Tensor:
    """Return `x` [n, b] with zeros after it, [length, b]."""
    return torch.cat((x, x.new_zeros(length - len(x), *x.shape[1:])))
