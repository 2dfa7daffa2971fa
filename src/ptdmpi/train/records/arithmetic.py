"""The arithmetic of a rank: which bits its processor computes for the same operations.

Two processors may round the same operations differently, for example because one of them adds more
numbers in one instruction, and so adds the terms of a sum in another order. The version of PyTorch,
the number of threads and some environment variables, such as ATEN_CPU_CAPABILITY, change the bits,
too. A run records its arithmetic in its checkpoints, so that a resumed run can report that its last
bits will differ.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.train.records.rates import device_name

SIZE = 128  # rows and columns of the operands


def arithmetic(device: torch.device) -> str:
    """Return a name of the arithmetic of this rank. On a CPU, the name consists of PyTorch's vector
    instructions, a hash of the results of some operations, and the number of threads (if it is not
    1), such as "AVX512 3f9a1c22 with 2 threads". On another device, it is the name of the
    device."""
    if device.type == "cpu":
        name = f"{torch.backends.cpu.get_cpu_capability()} {_hash(_results())}"
        threads = torch.get_num_threads()
        return name if threads == 1 else f"{name} with {threads} threads"
    return device_name(device)


def agree(world: World, device: torch.device, before: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of the ranks' arithmetics, each once and in alphabetical order, and lines
    for the log. There is a line if the ranks compute different bits, and a line if the ranks do not
    compute the bits of the checkpoint from which the run resumes.

    Every rank must call this function. `before` has the names in this checkpoint. It is empty if
    the run does not resume, or if an older version of ptdmpi wrote the checkpoint.
    """
    places = world.control.allgather((world.host, arithmetic(device)))
    names = sorted({name for _, name in places})
    lines = []
    if len(names) > 1:
        first = places[0][1]
        rank = next(rank for rank, (_, name) in enumerate(places) if name != first)
        host, name = places[rank]
        lines.append(
            f"the ranks' processors compute different last bits: rank 0 has {first}, rank {rank} "
            f"on {host} has {name}"
        )
    if before and set(names) != set(before):
        lines.append(
            f"the ranks compute other last bits than before ({', '.join(names)}; before: "
            f"{', '.join(before)}), so the bits of results may change"
        )
    return names, lines


def _results() -> list[Tensor]:
    """Return the results of some operations of a training step, for fixed operands."""
    numbers = torch.arange(SIZE * SIZE) * 7919 % 8191 - 4095
    x = (numbers.to(torch.float32) / 3001).view(SIZE, SIZE)
    half = x.to(torch.bfloat16)
    heads = x.view(1, SIZE // 16, SIZE, 16)
    with torch.no_grad():
        return [
            x.sum(0),
            x.sum(1),
            x.exp(),
            torch.rsqrt(x * x + 1),
            F.gelu(x, approximate="tanh"),
            F.log_softmax(x, -1),
            F.layer_norm(x, (SIZE,)),
            x @ x,
            x.double() @ x.double(),
            F.linear(x, x, x[0]),
            F.linear(half, half, half[0]).float(),
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
            torch.addcdiv(x, x, x.abs().sqrt() + 1, value=0.1),
        ]


def _hash(tensors: Sequence[Tensor]) -> str:
    """Return 8 hexadecimal digits of the SHA-256 of the tensors' bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]
