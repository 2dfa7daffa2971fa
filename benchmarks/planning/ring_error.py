"""`python -m benchmarks.planning.ring_error`: the rounding error of ring attention, depending on
the number of ranks c.

The command prints the error of attention and of its gradients in float32, compared with one rank in
float64, and draws docs/pictures/ring-error.png. If c is 1, the single rank uses the usual attention
kernels, without a ring.
"""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.launch import ROOT, answer
from benchmarks.planning.figures import COLORS
from ptdmpi.plan.show.table import lines

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor

PICTURE = ROOT / "docs/pictures/ring-error.png"
CONTEXTS = (1, 2, 3, 4)
LENGTHS = (768, 3072)  # both lengths are multiples of 2c, for each number of ranks c in CONTEXTS
SAMPLES, HEADS, KV_HEADS, HEAD_SIZE = 1, 4, 2, 64
UNIT = 1e-7  # the unit in which errors are drawn
TENSORS = ("output", "dq", "dk", "dv")


class Inputs(NamedTuple):
    """Queries, keys and values [batch, heads, tokens, head size], and a gradient of the output, in
    float64. Each value can also be represented exactly in float32."""

    q: "Tensor"
    k: "Tensor"
    v: "Tensor"
    dout: "Tensor"

    @classmethod
    def of(cls, length: int) -> "Inputs":
        """Return normally distributed inputs, the same on every rank."""
        import torch

        generator = torch.Generator().manual_seed(length)
        shapes = [(SAMPLES, heads, length, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        tensors = (torch.randn(shape, generator=generator) for shape in (*shapes, shapes[0]))
        return cls(*(tensor.double() for tensor in tensors))


def differentiated(
    attend: "Callable[[Tensor, Tensor, Tensor], Tensor]", inputs: Inputs
) -> "tuple[Tensor, ...]":
    """Return the output of the attention function `attend`, and the gradients of queries, keys and
    values."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = attend(q, k, v)
    out.backward(inputs.dout)
    return tuple(x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None)


def exact(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    """Return causal attention, computed by its definition and in the data type of its inputs."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    place = torch.arange(q.shape[2])
    scores = q @ k.transpose(-1, -2) / HEAD_SIZE**0.5
    weights = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
    return weights @ v


def errors(comm: "MPI.Comm", length: int) -> dict[str, float]:
    """Return the relative error of each tensor in `TENSORS`: the root mean square of the
    differences from float64, divided by the root mean square of the float64 values. All ranks of
    `comm` call this function, and get the same numbers."""
    from ptdmpi.comm.mpi import MpiCommunicator
    from ptdmpi.model.kernels import Kernels
    from ptdmpi.model.kernels.attention import AttentionCore
    from ptdmpi.model.kernels.blocks import Scores, Sight
    from ptdmpi.model.sequence.context import ContextAxis
    from ptdmpi.model.sequence.ring import RingWork, ring_attention

    axis = ContextAxis(MpiCommunicator(comm), "ring")
    scores = Scores(HEAD_SIZE**-0.5, True, 0, 0.0)
    work = RingWork(axis, Sight(scores, None, axis.positions), Kernels())

    def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        if axis.size == 1:
            return AttentionCore(scores)(q, k, v)
        return ring_attention(q, k, v, work)

    whole = Inputs.of(length)
    here = Inputs(*(axis.positions.of(x, 2).float().contiguous() for x in whole))
    results = differentiated(attend, here)
    expected = (axis.positions.of(x, 2) for x in differentiated(exact, whole))
    sums = [
        ((found.double() - right).square().sum().item(), right.square().sum().item())
        for found, right in zip(results, expected, strict=True)
    ]
    every = comm.allgather(sums)
    of_all = [
        [sum(part) for part in zip(*parts, strict=True)] for parts in zip(*every, strict=True)
    ]
    found = ((wrong / right) ** 0.5 for wrong, right in of_all)
    return dict(zip(TENSORS, found, strict=True))


def measured(context: int, length: int) -> dict[str, float]:
    """Start `context` ranks, and return the errors that they compute (see `errors`)."""
    text = answer(context, ["-m", "benchmarks.planning.ring_error", str(length)])
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def draw(found: dict[int, dict[int, dict[str, float]]]) -> None:
    """Draw the errors, with one panel for each length. `found` has the errors by length, number of
    ranks and tensor."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7.6, 3.2), dpi=100, layout="constrained")
    panels = canvas.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (length, by_context) in zip(panels, found.items(), strict=True):
        for name, color in zip(TENSORS, (*COLORS, "#777777"), strict=True):
            values = [by_context[context][name] / UNIT for context in CONTEXTS]
            axes.plot(CONTEXTS, values, "o-", color=color, label=name, markersize=4)
        axes.set_title(f"{length:,} positions, float32", loc="left", fontsize=10)
        axes.set_xticks(CONTEXTS)
        axes.set_xlabel("c (1: the usual kernel)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
    panels[0].set_ylim(0, 1.1 * panels[0].get_ylim()[1])
    panels[0].set_ylabel(f"relative error / {UNIT:g}")
    panels[0].legend(frameon=False, fontsize=8)
    canvas.savefig(PICTURE)


def main() -> None:
    """Measure the errors, print a table, and draw the picture."""
    found = {length: {c: measured(c, length) for c in CONTEXTS} for length in LENGTHS}
    rows = [["s", "c", *TENSORS, ""]]
    for length, by_context in found.items():
        for context, of_tensors in by_context.items():
            numbers = [f"{of_tensors[name]:.1e}" for name in TENSORS]
            rows.append([f"{length:,}", str(context), *numbers, ""])
    print("\n".join(lines(rows)))
    draw(found)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


def _measure(length: int) -> None:
    """Compute the errors of attention for `length` positions on this rank; rank 0 prints them as
    JSON."""
    from ptdmpi.comm import launch

    launch.prepare()
    import torch

    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        torch.set_num_threads(1)
        result = errors(world.control, length)
        if world.rank == 0:
            print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:]:
        _measure(int(sys.argv[1]))
    else:
        main()
