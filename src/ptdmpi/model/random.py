"""Randomness that belongs to the model, not to the layout.

Initial weights are a function of (seed, name). Dropout masks are a function of (seed, step, layer,
place in the layer, sample, position, channel; for attention: head and both positions). Each element
hashes its own logical coordinates, so every layout, and every recomputation, draws the same mask
without any generator state.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def initial(seed: int, name: str, shape: tuple[int, ...], init: float | str) -> Tensor:
    """The whole logical tensor `name`, float32 on the CPU.

    `init` is "zeros", "ones", or the standard deviation of a normal distribution around zero.
    """
    if init == "zeros":
        return torch.zeros(shape)
    if init == "ones":
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # on the CPU whatever the device, so that all start alike; a seed has 63 bits
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(0.0, float(init), generator=generator)


# The finaliser of splitmix64 (Steele, Lea and Flood 2014), in wrapping int64 arithmetic.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685

# Elements of a mask that are hashed at once on a CPU: the quickest of 2^14, 2^16, ... 2^22.
CHUNK_ELEMENTS = 2**18


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch shifts int64 arithmetically."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """A bijection of int64 whose output bits each depend on all input bits."""
    value = value.bitwise_xor(_shift(value, 30)).mul_(_MIX_1)
    value.bitwise_xor_(_shift(value, 27)).mul_(_MIX_2)
    return value.bitwise_xor_(_shift(value, 31))


@dataclass(frozen=True)
class RandomStream:
    """The random stream of one place in the model at one step.

    `samples` [b] are the global sample numbers of the microbatch, `first_position` is where this
    rank's positions begin (not 0 under sequence parallelism), `first_head` likewise.
    """

    key: int
    samples: Tensor
    first_position: int = 0
    first_head: int = 0

    @classmethod
    def of(cls, seed: int, step: int, samples: Tensor) -> "RandomStream":
        return cls(_fold(seed, step), samples)

    def at(self, *place: int, first_position: int = 0, first_head: int = 0) -> "RandomStream":
        """The stream of a place such as (layer, 0)."""
        return replace(
            self,
            key=_fold(self.key, *place),
            first_position=first_position,
            first_head=first_head,
        )

    def hidden_mask(self, shape: Sequence[int], rate: float) -> Tensor:
        """[s, b, h] bool: True where kept, with probability 1 - rate."""
        s, _, h = shape
        device = self.samples.device
        positions = torch.arange(self.first_position, self.first_position + s, device=device)
        rows = mix(mix(self.samples + self.key)[None, :] + positions[:, None] * _GOLDEN)
        return _keep(rows[:, :, None], torch.arange(h, device=device), rate)

    def attention_mask(self, shape: Sequence[int], rate: float) -> Tensor:
        """[b, a, s, s] bool: True where kept, with probability 1 - rate."""
        _, a, s, _ = shape
        device = self.samples.device
        heads = torch.arange(self.first_head, self.first_head + a, device=device)
        positions = torch.arange(s, device=device)
        rows = mix(mix(self.samples + self.key)[:, None] + heads[None, :] * _GOLDEN)
        rows = mix(rows[:, :, None] + positions * _GOLDEN)
        return _keep(rows[:, :, :, None], positions, rate)


def _keep(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """[..., columns] bool of the hashes rows [..., 1]."""
    # the upper half of the hash, as an integer: exact on every device, a float would not be
    threshold, columns = round(rate * 2**32), columns * _GOLDEN
    shape = (*rows.shape[:-1], columns.numel())
    rows = rows.reshape(-1, 1)
    kept = torch.empty((rows.shape[0], columns.numel()), dtype=torch.bool, device=rows.device)
    # A hash takes 8 bytes an element, a few times over: all at once would need more memory than
    # what the mask is for, and on a CPU leave the cache.
    elements = CHUNK_ELEMENTS if rows.device.type == "cpu" else 16 * CHUNK_ELEMENTS
    count = max(1, elements // columns.numel())
    for part, hashed in zip(kept.split(count), rows.split(count), strict=True):
        torch.ge(_shift(mix(hashed + columns), 32), threshold, out=part)
    return kept.view(shape)


def _fold(key: int, *numbers: int) -> int:
    for number in numbers:
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
    return key


def dropout(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Zero where not kept, and scale the rest so that the expectation stays."""
    return x * keep * (1.0 / (1.0 - rate))
