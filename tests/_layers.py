"""Layers on a tensor axis with known whole weights, and their whole gradients."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.model import state
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import Portion
from ptdmpi.model.parameters import data_types
from ptdmpi.model.random import initial
from ptdmpi.model.state import Piece, pieces_of
from ptdmpi.model.tensor_parallel import TensorAxis

CPU = torch.device("cpu")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
TOLERANCES = {"fp32": 1e-5, "fp64": 1e-12}


def whole_initial(seed: int, name: str, shape: tuple[int, ...], init: float | str) -> Tensor:
    """Return the whole initial tensor of a parameter."""
    return torch.cat([values for _, values in initial(seed, name, shape, init)])


def _dtype_of(precision: str) -> torch.dtype:
    """Return the type of activations; a precision may be followed by its scales, "fp8 delayed"."""
    return DTYPES[precision.partition(" ")[0]]


def random_tensor(name: str, shape: tuple[int, ...], precision: str) -> Tensor:
    """Return normal values, the same on every rank, and different for each name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(_dtype_of(precision))


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the greatest difference over the greatest magnitude; NaN if either has a NaN."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assemble(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Return the logical tensors of all ranks' pieces.

    Check that they are complete, and that replicas are equal to the bit.
    """
    whole, torn = state.assemble(pieces)
    assert torn == [], "replicas differ"
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} is incomplete"
    return whole


class Placed:
    """A layer whose weights are this rank's slices of random logical tensors, `whole`."""

    def __init__(self, layer: nn.Module, axis: TensorAxis, precision: str) -> None:
        self.layer, self.axis = layer, axis
        named = layer.named_parameters()
        if hasattr(layer, "named_logical_parameters"):
            named = layer.named_logical_parameters()
        portion = Portion(axis.rank, axis.size)
        self.buffer = ParameterBuffer(list(named), data_types(precision), CPU, portion)
        self.whole: dict[str, Tensor] = {}
        for name, entry in self.buffer.entries.items():
            # small, so that the softmaxes of a test are not saturated
            self.whole[name] = 0.2 * random_tensor(name, entry.declaration.shape, precision)
            local = entry.view(self.buffer.masters[0])
            for held in entry.declaration.held(axis.rank, axis.size):
                local[held.local.index] = self.whole[name][held.logical.index]
        self.buffer.refresh_weights()

    def gradients(self) -> dict[str, Tensor]:
        """Return whole gradients; sum the parts that sequence parallelism divides."""
        pieces: list[Piece] = []
        for name, entry in self.buffer.entries.items():
            gradient = entry.view(self.buffer.gradients).clone()
            if name in self.buffer.second:
                gradient += self.buffer.second[name].view(self.buffer.gradients)
            shared = entry.declaration.shared_gradient and self.axis.divides_sequence
            if shared or entry.declaration.partial_gradient:
                self.axis.comm.all_reduce(gradient)
            whole = self.buffer.own_part(entry)
            assert whole is not None
            held = pieces_of(
                "gradients",
                whole,
                gradient.view(-1),
                tensor_rank=self.axis.rank,
                tensor_size=self.axis.size,
            )
            pieces += [piece.copied() for piece in held]
        everyone = self.axis.comm.all_gather_object(pieces)
        return assemble(_copies_added(everyone))

    def check_gradients(self, serial: dict[str, Tensor], precision: str) -> None:
        """Check that every gradient is close to that of the serial leaves."""
        found = self.gradients()
        assert found.keys() == serial.keys()
        for name, gradient in found.items():
            expected = serial[name].grad
            if expected is None:  # the numbers of a balance, which no loss depends on
                assert not gradient.any(), name
                continue
            assert difference(gradient, expected) < TOLERANCES[precision], name


def _copies_added(everyone: list[list[Piece]]) -> list[Piece]:
    """Return the pieces of all ranks; copies of a piece on several ranks are summed into one."""
    copied: dict[tuple[str, str], Piece] = {}
    found = []
    for piece in (piece for of_rank in everyone for piece in of_rank):
        place = (piece.name, str(piece.box))
        if place not in copied or piece.values.shape == piece.shape:
            found.append(piece)
            copied[place] = piece
        else:
            copied[place].values.add_(piece.values)
    return found


def tensor_axis(comm, sequence_parallel: bool) -> TensorAxis:
    """Return the tensor axis of all ranks of `comm`."""
    return TensorAxis(MpiCommunicator(comm), sequence_parallel)


def positions(x: Tensor, axis: TensorAxis) -> Tensor:
    """Return this rank's positions of [s, ...], as between blocks."""
    return axis.between_blocks().of(x)


def columns(x: Tensor, parts: tuple[int, ...], axis: TensorAxis) -> Tensor:
    """Return this rank's share of the last dim, cut out of each part separately."""
    shares = [part.chunk(axis.size, -1)[axis.rank] for part in x.split(parts, -1)]
    return torch.cat(shares, -1).contiguous()
