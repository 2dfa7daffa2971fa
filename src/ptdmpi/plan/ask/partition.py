"""The four ways to divide the two matrix products of an MLP over the tensor axis, and the messages
that each way needs.

The MLP computes Y = f(X A) B, with the activation function f. X has one row for each token. A has
shape (h, u) and B has shape (g, h), where h is the hidden size and g is the number of inputs of B.
If f is gated, u = 2 g; otherwise u = g. If a weight matrix is cut by columns, each rank needs the
whole input and computes some columns of the output. If the matrix is cut by rows, each rank needs
only some columns of the input and computes a summand of the output. f is not linear, so it must be
applied to the complete sum: f(X1 A1 + X2 A2) is not f(X1 A1) + f(X2 A2). Therefore the four ways to
cut A and B need the following collectives. The letter after a collective is the number of columns
of the communicated tensor.

    A by, B by       forward                            backward
    columns, rows    sum h                              sum h
    columns, columns gather g, gather h                 reduce-scatter g, sum h
    rows, rows       reduce-scatter u, sum h            gather u, gather h
    rows, columns    sum u, gather h                    sum g, gather h

A sum is an all-reduce, which sends as much as a reduce-scatter and a gather together. With
tensor-parallel size t, each rank sends (t - 1)/t of the tensor in a reduce-scatter or a gather. The
first way, A by columns and B by rows, sends the least (Shoeybi et al. 2019, arXiv 1909.08053,
section 3). With the first way, nothing is sent between the two products, and the wider tensors with
g or u columns are never sent. Attention is cut as in the first way, but by heads instead of
columns.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ptdmpi.base.errors import InputError
from ptdmpi.base.near import divisors
from ptdmpi.config import ModelConfig
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.kernels import Group
from ptdmpi.plan.shape.parameters import first_linear


class Partition(NamedTuple):
    """A way to cut the matrices A and B, with the collectives of the forward and the backward pass.
    Each collective is a pair (kind, "h", "g" or "u"), where the letter is the number of columns of
    its tensor."""

    name: str
    sends: tuple[tuple[str, str], ...]


SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"
WAYS = (
    Partition("columns, rows", ((SUM, "h"), (SUM, "h"))),
    Partition("columns, columns", ((GATHER, "g"), (GATHER, "h"), (SCATTER, "g"), (SUM, "h"))),
    Partition("rows, rows", ((SCATTER, "u"), (SUM, "h"), (GATHER, "u"), (GATHER, "h"))),
    Partition("rows, columns", ((SUM, "u"), (GATHER, "h"), (SUM, "g"), (GATHER, "h"))),
)


def widths(config: ModelConfig) -> dict[str, int]:
    """Return the sizes h, g and u of a model's MLP, which the docstring of this module defines."""
    up = first_linear(config)
    width = config.expert_hidden if config.experts else config.ffn_hidden
    return {"h": config.hidden, "g": width, "u": sum(up.outputs)}


def sent(way: Partition, columns: Mapping[str, float], tensor: int) -> float:
    """Return the number of columns that each of `tensor` ranks sends in the forward and the
    backward pass together, if A and B are cut as in `way`. `columns` has the values of h, g and u.
    """
    rounds = {SUM: 2, GATHER: 1, SCATTER: 1}
    return sum(rounds[kind] * columns[size] for kind, size in way.sends) * (tensor - 1) / tensor


def answer(pricer: Pricer, tensor: int, micro_size: int) -> Reply:
    """Return the costs of the four ways to cut one layer's MLP on `tensor` ranks, for one
    microbatch of `micro_size` sequences. Raises InputError if the MLP cannot be divided among
    `tensor` ranks."""
    config, machine = pricer.model.config, pricer.machine
    columns = widths(config)
    if tensor < 2 or columns["g"] % tensor or columns["h"] % tensor:
        legal = [t for t in divisors(config.heads) if t > 1 and columns["g"] % t == 0]
        raise InputError(f"--tensor {tensor}: legal are {', '.join(map(str, legal)) or 'none'}")
    unit = micro_size * config.seq_length * machine.element_bytes
    group = Group(tensor, min(tensor, pricer.cluster.node.devices))
    times = {
        SUM: machine.all_reduce_s,
        GATHER: machine.all_gather_s,
        SCATTER: machine.reduce_scatter_s,
    }
    took_s = {
        way.name: sum(times[kind](unit * columns[size], group) for kind, size in way.sends)
        for way in WAYS
    }
    moved = {way.name: unit * sent(way, columns, tensor) for way in WAYS}
    first, second = sorted(moved.values())[:2]
    rows = [["A by, B by", "collectives", "sent per rank", "time", ""]]
    for way in WAYS:
        time, ratio = f"{took_s[way.name] * 1e3:.2f} ms", took_s[way.name] / min(took_s.values())
        amount = f"{moved[way.name] / 1e6:.1f} MB"
        rows.append([way.name, f"{len(way.sends)}", amount, time, f"x {ratio:.2f}"])
    return Reply(
        short=f"Columns, then rows: with t = {tensor} a rank sends {first / 1e6:.1f} MB for an MLP "
        f"and a microbatch. Any other way sends at least {second / first:.2f} times as much, "
        f"because it sends between the two products or sends tensors of {columns['g']} columns.",
        rows=rows,
        numbers={
            "tensor": tensor,
            "ways": [
                {"way": name, "sent_bytes": moved[name], "seconds": took_s[name]} for name in moved
            ],
        },
        title=f"MLP of {pricer.model.name}, t = {tensor} on {pricer.cluster.name}: how it is cut",
        panels=[
            Panel(
                "ms of messages per layer and microbatch",
                "",
                bars={name: 1e3 * each_s for name, each_s in took_s.items()},
            )
        ],
    )
