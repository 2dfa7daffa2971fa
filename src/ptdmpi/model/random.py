"""Random numbers that depend on the model, not on the layout.

Initial weights are a function of (seed, name). Dropout masks are a function of (seed, step, layer,
number of the dropout in the layer, sample, position, channel); for attention, head and key position
replace the channel. The mask of each element is a hash of its own logical coordinates. Every layout
and every recomputation therefore computes the same mask, without a generator's state.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.model.sequence.positions import ALL, Positions

# The number of elements that are drawn at once. It is small compared with a large tensor, and a
# multiple of 16.
SLAB_ELEMENTS = 2**22


def initial(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    init: float | str,
    *,
    wanted: Sequence[Box] | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the initial values of the logical tensor `name`, float32 on the CPU, in slabs of rows:
    (box, values) of those slabs that overlap a box in `wanted`, or of all slabs if it is None.

    `init` is "zeros", "ones", or the standard deviation of a normal distribution around zero. A
    slab has the same bits as that part of a tensor that is drawn at once. The reason is that torch
    draws numbers one after the other from the generator, and converts each sixteen of them to
    sixteen normal numbers.
    """
    whole = Box.whole(shape)
    if wanted is None:
        wanted = [whole]
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # always on the CPU, so that weights are the same on all devices; a seed has 63 bits
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    last = max((box.stop[0] for box in wanted), default=0)
    for slab in whole.slabs(_slab_rows(shape)):
        if slab.start[0] >= last:
            return
        here = any(slab.overlap(box) is not None for box in wanted)
        if isinstance(init, str):
            if here:
                yield slab, torch.full(slab.size, {"zeros": 0.0, "ones": 1.0}[init])
        elif here:
            yield slab, torch.empty(slab.size).normal_(0.0, init, generator=generator)
        else:  # advance the generator by the slab's numbers in half the time of drawing
            torch.empty(slab.elements, dtype=torch.uint8).random_(generator=generator)


def _slab_rows(shape: Sequence[int]) -> int:
    """Return the number of rows of a slab. The number of elements of a slab is a multiple of 16,
    and the last slab has at least 16 elements."""
    row = math.prod(shape[1:])
    grain = 16 // math.gcd(16, row)
    rows = max(1, SLAB_ELEMENTS // (row * grain)) * grain
    # torch draws the last sixteen numbers again, together, if 16 does not divide the tensor
    while shape[0] > rows and 0 < (shape[0] % rows) * row < 16:
        rows += grain
    return rows


# The finaliser of splitmix64 (Steele, Lea and Flood 2014), in wrapping int64 arithmetic.
GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685

# The number of elements of a mask that are hashed at once on a CPU. It is the fastest of 2^14,
# 2^16, ... 2^22.
CHUNK_ELEMENTS = 2**18


def shift_right(value: Tensor, bits: int) -> Tensor:
    """Return `value`, int64, after a logical right shift, in new memory; torch's own right shift is
    arithmetic."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """Map int64 values bijectively to values in which each bit depends on all input bits."""
    value = value.bitwise_xor(shift_right(value, 30)).mul_(_MIX_1)
    value.bitwise_xor_(shift_right(value, 27)).mul_(_MIX_2)
    return value.bitwise_xor_(shift_right(value, 31))


@dataclass(frozen=True)
class RandomStream:
    """The random stream of one dropout in the model at one step.

    `samples` [b] are the global sample numbers of the microbatch. `positions` are the positions of
    the masked tensor on this rank; `first_head` and `first_channel` are the numbers of its first
    head and first channel.
    """

    key: int
    samples: Tensor
    positions: Positions = ALL
    first_head: int = 0
    first_channel: int = 0

    @classmethod
    def of(
        cls, seed: int, step: int, samples: Tensor, positions: Positions = ALL
    ) -> "RandomStream":
        """Return the stream for a microbatch, or for some positions of it, in a step of a run with
        this seed."""
        return cls(fold(seed, step), samples, positions)

    def at(
        self,
        *place: int,
        positions: Positions | None = None,
        first_head: int = 0,
        first_channel: int = 0,
    ) -> "RandomStream":
        """Return the stream of the dropout that `place`, such as (layer, 0), identifies. The
        positions are the same if no others are given."""
        return replace(
            self,
            key=fold(self.key, *place),
            positions=positions or self.positions,
            first_head=first_head,
            first_channel=first_channel,
        )

    def hidden_mask(self, shape: Sequence[int], rate: float) -> Tensor:
        """Return a mask [s, b, h], bool, that is True for each element with probability 1 - rate.
        Elements with False are dropped."""
        s, _, h = shape
        device = self.samples.device
        positions = self.positions.numbers(s, device)
        rows = mix(mix(self.samples + self.key)[None, :] + positions[:, None] * GOLDEN)
        channels = torch.arange(self.first_channel, self.first_channel + h, device=device)
        return _keep(rows[:, :, None], channels, rate)

    def attention_mask(self, shape: Sequence[int], rate: float) -> Tensor:
        """Return a mask [b, a, queries, s], bool, that is True for each element with probability 1
        - rate. The mask has all s keys, and the queries at this rank's positions."""
        _, a, _, keys = shape
        numbers = torch.arange(keys, device=self.samples.device)
        rows = self.query_hashes(a, self.positions.of(numbers))
        return _keep(rows[..., None], numbers, rate)

    def query_hashes(self, heads: int, positions: Tensor) -> Tensor:
        """Return a hash int64 [b, heads, queries] of queries at some positions [queries], for
        `kept_keys`."""
        last = self.first_head + heads
        numbers = torch.arange(self.first_head, last, device=positions.device)
        rows = mix(mix(self.samples + self.key)[:, None] + numbers[None, :] * GOLDEN)
        return mix(rows[:, :, None] + positions * GOLDEN)


def kept_keys(hashes: Tensor, keys: range, rate: float) -> Tensor:
    """Return the part of an attention mask, bool [b, heads, queries, keys], for some queries, given
    by their `query_hashes`, and keys at consecutive positions."""
    numbers = torch.arange(keys.start, keys.stop, device=hashes.device)
    return _keep(hashes[..., None], numbers, rate)


def _keep(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return a mask [..., columns], bool, from the hashes `rows` [..., 1] and `columns`."""
    # compare the upper half of the hash as an integer, which is exact on every device, unlike a
    # float
    threshold = round(rate * 2**32)
    columns = columns * GOLDEN
    shape = (*rows.shape[:-1], columns.numel())
    rows = rows.reshape(-1, 1)
    kept = torch.empty((rows.shape[0], columns.numel()), dtype=torch.bool, device=rows.device)
    # A hash takes 8 bytes an element, several times: hashing all elements at once would need more
    # memory than the masked tensor, and would not fit a CPU's cache.
    elements = CHUNK_ELEMENTS if rows.device.type == "cpu" else 16 * CHUNK_ELEMENTS
    count = max(1, elements // columns.numel())
    for part, hashed in zip(kept.split(count), rows.split(count), strict=True):
        torch.ge(shift_right(mix(hashed + columns), 32), threshold, out=part)
    return kept.view(shape)


def fold(key: int, *numbers: int) -> int:
    """Return a signed 64-bit hash of `key` and of a sequence of numbers such as (step, layer)."""
    for number in numbers:
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
    return key


def dropout(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Return `x` with zeros where the mask is False. The other elements are scaled so that the
    expected value does not change."""
    return x * keep * (1.0 / (1.0 - rate))
