"""The function that makes the modules of the operator `MixExperts`, and the search for these
modules."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ptdmpi.model.built import add
from ptdmpi.model.experts.mixture import Mixture, Router
from ptdmpi.model.experts.routing import Routing
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.operator import Operator


def experts(owner: nn.Module, row: Operator, build: Any) -> Callable[..., Tensor]:
    """Make the router and the experts, and return the function that computes both (see
    `ptdmpi.model.operators.Maker`)."""
    assert isinstance(row, MixExperts)
    router = Router(row)
    add(owner, row.router_name, router)
    routing, context = Routing(build.model), build.context.comm
    mixture = Mixture(row, routing, build.axis, build.experts, context=context)
    add(owner, row.name, mixture)

    def compute(x: Tensor, *rest: Any) -> Tensor:
        """Return the output of the experts for each token. `rest` has the outputs of the shared
        experts, if there are any, and then the `Context` of the forward pass."""
        *shared, context = rest
        return sum(shared, mixture(x, router, context.chosen, context.factors))

    return compute


def mixtures_in(layers: Iterable[tuple[int, nn.Module]]) -> dict[int, Mixture]:
    """Return the mixtures of experts in `layers`, each with the number of its layer."""
    return {
        number: module
        for number, layer in layers
        for module in layer.modules()
        if isinstance(module, Mixture)
    }
