"""Upcycling a dense checkpoint to a mixture of experts (Komatsuzaki et al. 2022, arXiv 2212.05055).

Every expert of a layer is a copy of the layer's MLP, and the router is random. All other weights
are copied. The experts of a layer become different only during training, because they process
different tokens. If the router's weights for a token are divided by their sum, the weighted sum of
the chosen experts' outputs is the output of the dense MLP, whichever experts the router chooses.
The first loss of the mixture of experts is then the loss of the dense model, up to rounding.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.box import Box
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.boxes import Array, Damaged, Outgoing, Reader
from ptdmpi.config import InputError, ModelConfig, TaskConfig
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.from_hf import write_checkpoint, write_config
from ptdmpi.convert.tensors import slabs
from ptdmpi.inference.stored import (
    CONFIG,
    StoredModel,
    config_of,
    declarations,
    open_model,
    require_weights,
)
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.shape.parameters import active_count, parameter_count

EXPERT = re.compile(r"\.experts\.\d+")
ROUTER = re.compile(r"\.mlp\.router\.(weight|balance)$")
# Initial standard deviation of the router's weights: the default of model.init_std
ROUTER_STD = 0.02
MOST_STD = 1e6  # far above any useful value, and far below the greatest float32


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that a dense model becomes.

    `count` is the number of experts in a layer, and `chosen` is the number of experts that process
    a token. `dense_layers` and `moe_every` have the meaning of these keys of [model]. If
    `normalizes` is True, the weights of a token's experts are divided by their sum. If `normalizes`
    is False, the weights of a token's experts are multiplied by count / chosen, so that their sum
    is about 1 at the beginning. `router_std` is the standard deviation of the router's initial
    weights, which are random numbers, and `seed` is the seed of these random numbers.
    """

    count: int
    chosen: int
    dense_layers: int = 0
    moe_every: int = 1
    normalizes: bool = True
    router_std: float = ROUTER_STD
    seed: int = 0

    def keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of [model] that turn the dense model `model` into this mixture of
        experts.
        """
        return {
            "experts": self.count,
            "experts_per_token": self.chosen,
            "expert_hidden": model.ffn_hidden,
            "dense_layers": self.dense_layers,
            "moe_every": self.moe_every,
            "router_normalize": self.normalizes,
            "router_scale": 1.0 if self.normalizes else self.count / self.chosen,
        }


@dataclass(frozen=True)
class Upcycled:
    """The result of upcycling. `layers` is the number of layers with experts. `bytes` is the size
    of the weights."""

    path: Path
    experts: int
    experts_per_token: int
    layers: int
    parameters: int
    active_parameters: int
    bytes: int


def upcycle(source: Path, target: Path, experts: Experts, kind: str = WEIGHTS) -> Upcycled:
    """Write the dense model at `source` as a mixture of experts at `target`.

    `target` is a directory from which a run may begin (`checkpoint.initial`). `kind` selects the
    stored values that are copied: the trained weights, or the moving average of the weights. Raise
    InputError if the model at `source` is damaged, or cannot have such experts; then `target` is
    not written.
    """
    stored = open_model(source, kind)
    dense = stored.config().model
    _require_dense(stored, dense)
    if not experts.router_std <= MOST_STD:
        raise InputError(f"--router-std {experts.router_std}: legal: 0 to {MOST_STD:g}")
    model = {**dense.model_dump(), **experts.keys(dense)}
    config = config_of(model)
    needed = declarations(config, stored.vocab_size)
    damaged = examine.problems(stored.checkpoint)
    if damaged:
        raise InputError(f"checkpoint {stored.checkpoint} is damaged: {damaged[0]}")
    with new_directory(target) as folder, stored.reader() as reader:
        require_weights(reader, declarations(stored.config(), stored.vocab_size))
        parts = [*_copies(reader, needed), *_routers(experts, needed)]
        files.require_space(folder, sum(part.nbytes for part in parts))
        history = {k: v for k, v in stored.manifest.said.items() if k == "trained_on"}
        written = config.model.model_dump()
        size = write_checkpoint(folder / "checkpoints", parts, written, history)
        write_config(folder / CONFIG, written, TaskConfig(), origin=source, target=target)
    return Upcycled(
        path=target,
        experts=experts.count,
        experts_per_token=experts.chosen,
        layers=len(config.model.mixing_layers),
        parameters=parameter_count(config.model, stored.vocab_size),
        active_parameters=active_count(config.model, stored.vocab_size),
        bytes=size,
    )


def _require_dense(stored: StoredModel, model: ModelConfig) -> None:
    """Raise InputError for a model that cannot be upcycled. This function does not check all
    reasons: for example, the rules about [model] report biases in the MLP, which exclude
    experts."""
    if model.experts:
        raise InputError(
            f"{stored.checkpoint} has {model.experts} experts already; legal: a model without them"
        )
    if stored.manifest.form is not None:
        raise InputError(
            f"{stored.checkpoint} is quantized; legal: the model that it was made from"
        )
    if model.mtp_modules:
        raise InputError(
            f"{stored.checkpoint} has modules for multi-token prediction; legal: a model with "
            "mtp_depth = 0"
        )
    if model.classifies:
        raise InputError(f"{stored.checkpoint} has a head for a task; legal: a model of text")


def _copies(reader: Reader, needed: Mapping[str, Declaration]) -> Iterator[Outgoing]:
    """Yield all weights except those of routers, in blocks of complete rows. The weights of an
    expert are the weights of the dense MLP in its layer."""
    for name in sorted(needed):
        if ROUTER.search(name):
            continue
        stored = reader.manifest[key(WEIGHTS, EXPERT.sub("", name))]
        for box in slabs(stored.shape, np.dtype(stored.dtype).itemsize):
            yield Outgoing(
                tensor=key(WEIGHTS, name),
                shape=stored.shape,
                box=box,
                dtype=stored.dtype,
                values=partial(_read, reader, EXPERT.sub("", name), box, dtype=stored.dtype),
            )


def _read(reader: Reader, name: str, box: Box, *, dtype: str) -> Array:
    """Return a block of a weight. Raise InputError if the block is damaged."""
    values = np.empty(box.size, dtype)
    try:
        reader.read(key(WEIGHTS, name), box, values)
    except Damaged as error:
        raise InputError(str(error)) from None
    return values


def _routers(experts: Experts, needed: Mapping[str, Declaration]) -> Iterator[Outgoing]:
    """Yield the weights of the routers. Also yield the numbers that balance the loads of the
    experts; their initial values are 0.
    """
    for name in sorted(name for name in needed if ROUTER.search(name)):
        shape = needed[name].shape
        std = experts.router_std if name.endswith(".weight") else 0.0
        yield Outgoing(
            tensor=key(WEIGHTS, name),
            shape=shape,
            box=Box.whole(shape),
            dtype="float32",
            values=partial(_normal, name, shape, std=std, seed=experts.seed),
        )


def _normal(name: str, shape: tuple[int, ...], *, std: float, seed: int) -> Array:
    """Return an array of normally distributed numbers with standard deviation `std`. The numbers
    depend only on the name of the weight, the shape and the seed."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (std * generator.standard_normal(shape)).astype(np.float32)
