"""Functions that make the modules of the operators that only latent attention has. Each of these
functions returns the function that computes the operator.

The matrix that expands latent vectors is the module of the operator `ExpandLatents`. In generation
with a cache, `ExpandLatents` returns the latent vectors unchanged. The operators before and after
the attention core then multiply queries and outputs by its matrix (`absorbed`).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ptdmpi.model import built
from ptdmpi.model.kernels.norm import Norm
from ptdmpi.model.latent.absorbed import Absorbed, CachedPass
from ptdmpi.model.latent.heads import LatentHeads, Latents
from ptdmpi.model.tensor_parallel import ColumnParallelLinear
from ptdmpi.plan.layer.latent.operators import EXPANSION, ExpandLatents, SplitLatents
from ptdmpi.plan.layer.operator import Operator


def latents(owner: nn.Module, row: Operator, build: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Make the norms of the latent vectors, and return the function that divides and normalizes
    these vectors (see `ptdmpi.model.operators.Maker`)."""
    assert isinstance(row, SplitLatents)
    norms = [Norm(build.model, size=part.size) for _, part in row.norms]
    for (name, _), norm in zip(row.norms, norms, strict=True):
        built.add(owner, name, norm)
    return Latents(norms)


def expanded(owner: nn.Module, row: Operator, build: Any) -> Callable[..., Tensor]:
    """Make the linear layer that expands the latent vectors, and return the function that applies
    this layer."""
    assert isinstance(row, ExpandLatents)
    linear = built.added_linear(owner, row, build.axis)

    def compute(x: Tensor, context: Any) -> Tensor:
        """Return the expanded keys and values or, with a cache, the latent vectors."""
        if context.cache is not None:
            return x
        return linear(x, context.of_adapters(build.layer))

    return compute


def heads(owner: nn.Module, row: Operator, build: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Make the function that makes queries, keys and values by head."""
    return LatentHeads(build.model, build.axis, _absorbed(owner, build))


def outputs(owner: nn.Module, row: Operator, build: Any) -> Callable[..., Tensor]:
    """Make the function that expands the outputs of the heads in a pass with a cache. In a pass
    without a cache, this function returns its argument."""
    absorbed = _absorbed(owner, build)

    def compute(y: Tensor, context: CachedPass) -> Tensor:
        """Return the outputs of the heads, [s, b, values of all heads of this rank]."""
        return y if context.cache is None else absorbed.outputs(y)

    return compute


def _absorbed(owner: nn.Module, build: Any) -> Absorbed:
    linear = owner.get_submodule(EXPANSION)
    assert isinstance(linear, ColumnParallelLinear)
    return Absorbed(build.model, linear)
