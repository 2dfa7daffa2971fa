"""The arithmetic of element-wise updates on flat tensors: AdamW and SGD with PyTorch's functions,
Lion, and the moving average of the weights. The module `muon` has the updates of matrices.

AdamW and SGD call the same functions as the classes of torch.optim. The classes themselves are not
used, because they load torch's compiler: 800 modules, 70 MB, and one second at the start of every
rank.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import plugin, users_code
from ptdmpi.config import OptimizerConfig
from ptdmpi.engine.offload import Alike

# The number of elements of a temporary tensor. The memory plan does not count such a tensor,
# because it is small.
PIECE = 1 << 20

IN_PLACE = "an update that changes elements in place"


def update(config: OptimizerConfig, group: Alike, rate: float, updates: Tensor) -> None:
    """Update the master weights and the moments of a group of elements. `rate` is the learning rate
    of the step, and `updates` (float32 scalar) is the number of earlier updates."""
    moments = group.moments[:-1] if config.ema_decay else group.moments
    with torch.no_grad():
        UPDATES[config.kind](config, group._replace(moments=moments), rate * group.share, updates)
        if config.ema_decay:
            # the formula of torch.optim.swa_utils.get_ema_multi_avg_fn: ema + (1 - decay) (weight -
            # ema)
            torch._foreach_lerp_(group.moments[-1], group.masters, 1 - config.ema_decay)


def update_in_one_pass(
    config: OptimizerConfig, group: Alike, rate: float, updates: int, *, factor: float
) -> None:
    """Do the update of AdamW by a kernel in Triton. The kernel also multiplies the gradients by
    `factor` before the update, and afterwards writes the weights and sets the gradients to zero.
    `rate` is the learning rate of the step, and `updates` is the number of earlier updates."""
    from ptdmpi.model.kernels.fused import update as fused

    step = fused.UpdateNumbers(factor, rate * group.share, group.decay, updates)
    for number, (masters, gradients) in enumerate(zip(group.masters, group.gradients, strict=True)):
        fused.update(
            config,
            masters,
            gradients,
            [parts[number] for parts in group.moments],
            weights=group.weights[number] if group.weights else None,
            step=step,
        )


def adamw_update(config: OptimizerConfig, group: Alike, rate: float, updates: Tensor) -> None:
    """Do the update of AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2."""
    first, second = group.moments
    adamw(
        group.masters,
        group.gradients,
        first,
        second,
        [],
        # For each parameter tensor, torch's function needs a separate scalar tensor with the number
        # of updates, because the function adds 1 to this scalar.
        [updates.clone() for _ in group.masters],
        # torch's fused kernel may round the last elements of a tensor differently if the length is
        # not a multiple of its vectors; every tensor here has a multiple of `ALIGNMENT` elements
        # (plan/layer/parts.py)
        fused=True,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=rate,
        weight_decay=group.decay,
        eps=config.eps,
        maximize=False,
    )


def sgd_update(config: OptimizerConfig, group: Alike, rate: float, updates: Tensor) -> None:
    """Do the update of torch.optim.SGD, without dampening."""
    # torch.optim.SGD has no momentum buffer before the first step; a buffer of zeros gives the same
    # first update
    buffers: list[Tensor | None] = [None] * len(group.masters)
    if group.moments:
        buffers = list(group.moments[0])
    sgd(
        group.masters,
        group.gradients,
        buffers,
        weight_decay=group.decay,
        momentum=config.momentum,
        lr=rate,
        dampening=0.0,
        nesterov=config.nesterov,
        maximize=False,
    )


def lion_update(config: OptimizerConfig, group: Alike, rate: float, updates: Tensor) -> None:
    """Do the update of Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2). As in the authors'
    program, weight decay is applied first. Then the learning rate times the sign of a weighted mean
    of momentum and gradient is subtracted."""
    (moments,) = group.moments
    for masters, gradients, momentum in zip(group.masters, group.gradients, moments, strict=True):
        pieces = (flat.split(PIECE) for flat in (masters, gradients, momentum))
        for master, gradient, kept in zip(*pieces, strict=True):
            master.mul_(1 - rate * group.decay)
            sign = torch.mul(kept, config.beta1).add_(gradient, alpha=1 - config.beta1).sign_()
            master.add_(sign, alpha=-rate)
            kept.mul_(config.beta2).add_(gradient, alpha=1 - config.beta2)


def own_update(config: OptimizerConfig, group: Alike, rate: float, updates: Tensor) -> None:
    """Do the update of the user's own optimizer, `optimizer.own`. Raise InputError if the update
    replaces a tensor or changes its size, because the run uses the tensors of before."""
    before = [(name, tensor, _place(tensor)) for name, tensor in _named(group)]
    with users_code(config.own):
        plugin("optimizers", config.own).update(config, group, rate, updates)
    after = [tensor for _, tensor in _named(group)]
    if len(before) != len(after):
        raise InputError(f"{config.own}: update changes the lists of its group; legal: {IN_PLACE}")
    for (name, tensor, place), now in zip(before, after, strict=True):
        if now is not tensor or _place(now) != place:
            raise InputError(
                f"{config.own}: update replaces a tensor of group.{name}, or changes its size; "
                f"legal: {IN_PLACE}"
            )


def _named(group: Alike) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that an optimizer of the user may change or read, after the name of its
    list in `group`."""
    lists = {"masters": group.masters, "gradients": group.gradients}
    lists |= {f"moments[{number}]": parts for number, parts in enumerate(group.moments)}
    for name, tensors in lists.items():
        for tensor in tensors:
            yield name, tensor


def _place(tensor: object) -> object:
    """Return the shape of a tensor and the address of its first element."""
    return (tensor.shape, tensor.data_ptr()) if isinstance(tensor, Tensor) else None


UPDATES: Mapping[str, Callable[[OptimizerConfig, Alike, float, Tensor], None]] = {
    "adamw": adamw_update,
    "sgd": sgd_update,
    "lion": lion_update,
    "own": own_update,
    # with Muon, this function updates only the parameters that are not matrices of layers;
    # `engine/muon.py` updates these matrices
    "muon": adamw_update,
}
