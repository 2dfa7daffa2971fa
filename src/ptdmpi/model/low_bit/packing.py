"""Packing of small integers into bytes: n integers of b bits each take (n * b / 8) bytes, rounded
up."""

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Return the number of bytes into which `pack` packs `count` numbers of `bits` bits."""
    low = count * (bits // 8)
    return low + -(-count * (bits % 8) // 8)


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack n integers, int64 [n] in [0, 2^bits), into bytes: uint8 [packed_bytes(n, bits)].

    The result has first the lowest bytes of all integers, then the second lowest bytes of all
    integers, and so on. If `bits` is not a multiple of 8, `bits % 8` bits of each integer remain.
    The remaining bits of eight integers are packed into `bits % 8` bytes; the first integer has the
    lowest bits.
    """
    planes = []
    for _ in range(bits // 8):
        planes.append((values & 255).to(torch.uint8))
        values = values >> 8
    rest = bits % 8
    if rest:
        count = values.numel()
        padded = values.new_zeros(-(-count // 8) * 8)
        padded[:count] = values
        shifts = torch.arange(8, device=values.device) * rest
        words = (padded.view(-1, 8) << shifts).sum(dim=1)
        whole = words.view(torch.uint8).view(-1, 8)[:, :rest].reshape(-1)
        planes.append(whole[: -(-count * rest // 8)])
    return torch.cat(planes) if planes else values.new_zeros(0, dtype=torch.uint8)


def unpack(code: Tensor, count: int, bits: int) -> Tensor:
    """Return the `count` numbers of `bits` bits each, int64, that `pack` has packed into `code`."""
    values = torch.zeros(count, dtype=torch.int64, device=code.device)
    for plane in range(bits // 8):
        values += code[plane * count : (plane + 1) * count].to(torch.int64) << (8 * plane)
    rest = bits % 8
    if rest:
        tail = code[bits // 8 * count :]
        whole = code.new_zeros((-(-count // 8), 8))
        spread = code.new_zeros(len(whole) * rest)
        spread[: len(tail)] = tail
        whole[:, :rest] = spread.view(-1, rest)
        shifts = torch.arange(8, device=code.device) * rest
        eights = (whole.view(torch.int64).view(-1, 1) >> shifts) & ((1 << rest) - 1)
        values += eights.view(-1)[:count] << (bits - rest)
    return values
