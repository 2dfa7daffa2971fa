"""The check that the module of a user's operator has the parameters that the operator describes."""

from torch import nn

from ptdmpi.base.errors import InputError
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Linear


def require_parts(owner: nn.Module, row: Operator, module: nn.Module, tensor: int) -> None:
    """Raise InputError unless the parameters of `module` are those that `row.parts()` describes, on
    one of `tensor` tensor ranks. Memory, plan and optimizer read the parts, not the module."""
    mistake = f"sublayer operator {row.name}: its parts() and its module differ: "
    described = {f"{row.name}.{name}" if name else row.name for name, _ in module.named_modules()}
    for name, part in row.parts().items():
        found = []
        if name in described:
            found = list(owner.get_submodule(name).parameters(recurse=False))
        said = list(part.weights(tensor))
        if [weight.numel() for weight in found] != said:
            raise InputError(
                f"{mistake}{name} has {said} elements by parts(), and "
                f"{[weight.numel() for weight in found]} in the module"
            )
        if not isinstance(part, Linear) and any(weight.dim() > 1 for weight in found):
            raise InputError(
                f"{mistake}{name} is no linear, and its parameter has {found[0].dim()} dims; "
                "legal: a Linear, or parameters of one dim"
            )
    others = sum(weight.numel() for weight in module.parameters())
    others -= sum(sum(part.weights(tensor)) for part in row.parts().values())
    if others:
        raise InputError(f"{mistake}the module has {others} more elements than parts() says")
