"""The tensors that a layer keeps, by the account of its rows."""

from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import Item
from ptdmpi.plan.layer.folds import items, operators
from ptdmpi.plan.layer.sizes import Sizes


def layer_items(sizes: Sizes, mode: str) -> list[Item]:
    """Every tensor that the backward of a layer of the sizes' model needs."""
    return items(operators(describe.layer(sizes.model)), sizes, mode)
