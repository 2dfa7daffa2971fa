"""Random numbers that do not depend on the layout of a run, which is the division of the model and
its data among ranks.

Initial weights are a function of (seed, name). Dropout masks are a function of (seed, step, layer,
number of the dropout in the layer, sample, position, channel). For attention weights, the head and
the position of the key replace the channel. The mask of each element is a hash of these
coordinates. Every layout and every recomputation therefore computes the same mask, and no state of
a random generator is needed.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.model.sequence.positions import ALL, Positions

# The initial values of a large tensor are drawn for a slab of consecutive rows at a time, so that
# little memory is needed for random numbers. A slab has about this number of elements (a multiple
# of 16), or more if its rows are very long.
SLAB_ELEMENTS = 2**22


def initial(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    init: float | str,
    *,
    wanted: Sequence[Box] | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield (box, values) for slabs of consecutive rows of the undivided parameter `name`. `shape`
    is the shape of the parameter. `box` is the position of the slab in the parameter, and `values`
    are its initial values, float32 on the CPU. Only slabs that overlap a box in `wanted` are
    yielded; if `wanted` is None, all slabs are yielded.

    `init` is "zeros", "ones", or the standard deviation of a normal distribution around zero. A
    slab is bitwise equal to the same rows of a tensor that torch draws in one call. This is
    possible because torch draws numbers one after the other from the generator, and converts each
    group of sixteen numbers to sixteen normally distributed numbers.
    """
    whole = Box.whole(shape)
    if wanted is None:
        wanted = [whole]
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # The generator is always on the CPU, so that weights are the same on all devices. Torch accepts
    # seeds of 63 bits, so the last bit of the digest is dropped.
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
        # This slab is not needed, but the next slab needs the state that the generator has after
        # this slab. Random bytes advance the generator equally, in half the time.
        else:
            torch.empty(slab.elements, dtype=torch.uint8).random_(generator=generator)


def _slab_rows(shape: Sequence[int]) -> int:
    """Return the number of rows of a slab (consecutive rows of a tensor whose values are drawn at
    once). The number of elements of a slab is a multiple of 16, and the last slab has at least 16
    elements."""
    row = math.prod(shape[1:])
    grain = 16 // math.gcd(16, row)
    rows = max(1, SLAB_ELEMENTS // (row * grain)) * grain
    # If 16 does not divide the number of elements, torch draws the last sixteen numbers of a tensor
    # again. These sixteen numbers must therefore be in one slab.
    while shape[0] > rows and 0 < (shape[0] % rows) * row < 16:
        rows += grain
    return rows


# the constants of `mix`, the finaliser of splitmix64 (Steele, Lea and Flood 2014), which computes
# in wrapping int64 arithmetic
GOLDEN = -7046029254386353131
MIX_1 = -4658895280553007687
MIX_2 = -7723592293110705685

# On a CPU, a dropout mask is computed in chunks of about this number of elements. Measurements
# compared all powers of four from 2^14 to 2^22, and this number was the fastest.
CHUNK_ELEMENTS = 2**18


def shift_right(value: Tensor, bits: int) -> Tensor:
    """Return `value`, int64, shifted to the right by `bits` bits, and fill the free bits with zeros
    (torch's own right shift copies the sign bit). The result is a new tensor."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """Map int64 values bijectively to values in which each bit depends on all input bits."""
    value = value.bitwise_xor(shift_right(value, 30)).mul_(MIX_1)
    value.bitwise_xor_(shift_right(value, 27)).mul_(MIX_2)
    return value.bitwise_xor_(shift_right(value, 31))


@dataclass(frozen=True)
class RandomStream:
    """The random stream of one dropout in the model at one step.

    `key` is a hash of the coordinates that are the same for all elements. `samples` [b] are the
    global sample numbers of the microbatch. `positions` are the positions, on this rank, of the
    tensor to which the dropout is applied. This tensor may have only some heads or channels of the
    model: `first_head` and `first_channel` are the numbers of its first head and its first channel.
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
        """Return the stream for the `samples` and `positions` of a microbatch, in a step of a run
        with this seed."""
        return cls(fold(seed, step), samples, positions)

    def at(
        self,
        *place: int,
        positions: Positions | None = None,
        first_head: int = 0,
        first_channel: int = 0,
    ) -> "RandomStream":
        """Return the stream of the dropout that `place` identifies, such as (layer, 0), for heads
        from `first_head` on and channels from `first_channel` on. If `positions` is None, the
        result has the same positions as this stream."""
        return replace(
            self,
            key=fold(self.key, *place),
            positions=positions or self.positions,
            first_head=first_head,
            first_channel=first_channel,
        )

    def hidden_mask(self, shape: Sequence[int], rate: float) -> Tensor:
        """Return a bool mask of the given shape [s, b, h] in which each element is True with
        probability 1 - rate. Elements with False are dropped."""
        s, _, h = shape
        device = self.samples.device
        positions = self.positions.numbers(s, device)
        rows = mix(mix(self.samples + self.key)[None, :] + positions[:, None] * GOLDEN)
        channels = torch.arange(self.first_channel, self.first_channel + h, device=device)
        return _keep(rows[:, :, None], channels, rate)

    def attention_mask(self, shape: Sequence[int], rate: float) -> Tensor:
        """Return a bool mask of the given shape [b, heads, queries, keys] in which each element is
        True with probability 1 - rate. The keys are at all positions, and the queries are at this
        rank's positions."""
        _, a, _, keys = shape
        numbers = torch.arange(keys, device=self.samples.device)
        rows = self.query_hashes(a, self.positions.of(numbers))
        return _keep(rows[..., None], numbers, rate)

    def query_hashes(self, heads: int, positions: Tensor) -> Tensor:
        """Return hashes, int64 [b, heads, queries], of the queries at `positions` [queries].
        `kept_keys` computes parts of an attention mask from these hashes."""
        last = self.first_head + heads
        numbers = torch.arange(self.first_head, last, device=positions.device)
        rows = mix(mix(self.samples + self.key)[:, None] + numbers[None, :] * GOLDEN)
        return mix(rows[:, :, None] + positions * GOLDEN)


def kept_keys(hashes: Tensor, keys: range, rate: float) -> Tensor:
    """Return a part of an attention mask, bool [b, heads, queries, keys], for some queries and for
    keys at consecutive positions. `hashes` are the `query_hashes` of the queries."""
    numbers = torch.arange(keys.start, keys.stop, device=hashes.device)
    return _keep(hashes[..., None], numbers, rate)


def _keep(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return a bool mask [..., columns] in which each element is True with probability 1 - rate. An
    element is computed from the hash of its row, in `rows` [..., 1], and its number in
    `columns`."""
    # compare the upper half of the hash as an integer, because integer comparisons, unlike floats,
    # are exact on every device
    threshold = threshold_of(rate)
    columns = columns * GOLDEN
    shape = (*rows.shape[:-1], columns.numel())
    rows = rows.reshape(-1, 1)
    kept = torch.empty((rows.shape[0], columns.numel()), dtype=torch.bool, device=rows.device)
    # Hashing needs several temporary values of 8 bytes for each element. If all elements were
    # hashed at once, the temporary values would take more memory than the masked tensor, and would
    # not fit into the cache of a CPU.
    elements = CHUNK_ELEMENTS if rows.device.type == "cpu" else 16 * CHUNK_ELEMENTS
    count = max(1, elements // columns.numel())
    for part, hashed in zip(kept.split(count), rows.split(count), strict=True):
        torch.ge(shift_right(mix(hashed + columns), 32), threshold, out=part)
    return kept.view(shape)


def threshold_of(rate: float) -> int:
    """Return the number with which the upper 32 bits of an element's hash are compared: the element
    is dropped if they are less than this number."""
    return round(rate * 2**32)


def fold(key: int, *numbers: int) -> int:
    """Return a signed 64-bit hash of `key` and of a sequence of numbers such as (step, layer)."""
    for number in numbers:
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
    return key


def dropout(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Return `x` with zeros where the mask `keep` is False. Elements for which the mask is True are
    divided by 1 - `rate`, so that the expected value does not change."""
    return x * keep * (1.0 / (1.0 - rate))
