"""The compilation of layers by torch.compile.

Layers are compiled if the configuration says so (`run.compile = true`). With `run.compile = "auto"`
the ranks measure, at the first start of a run on GPUs, whether compiled layers save more time than
their compilation takes. On a CPU nothing is compiled unless the configuration says so.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, SharedInputError
from ptdmpi.config.configuration import Sections
from ptdmpi.config.rules import rules
from ptdmpi.model.kernels import compiler
from ptdmpi.model.kernels.timing.bench import Bench
from ptdmpi.model.operators import Context
from ptdmpi.model.stage import Stage
from ptdmpi.model.transformer import Block

# If the layers of a run take less than this number of seconds, compilation is not tried: it takes
# about a minute, and compiled layers seldom save more than a fifth of the time.
LEAST_S = 300.0


class Decision(NamedTuple):
    """The result of a measurement: whether the layers are compiled, and the reason as a text."""

    compiled: bool
    why: str


def may_compile(config: Config, device: torch.device, ranks: int) -> bool:
    """Return True if a measurement may choose compiled layers for a run on `ranks` ranks: with
    `run.compile = "auto"` on a GPU, if no other setting excludes compiled layers.
    `run.reproducible` excludes them, because the result of a measurement depends on the machine."""
    run = config.run
    if run.compile != "auto" or device.type != "cuda" or run.reproducible:
        return False
    with_, without = (
        set(rules(Sections.of_config(config.replace("run", compile=value)), ranks))
        for value in (True, False)
    )
    return with_ <= without


def compile_if_asked(
    config: Config, stages: Mapping[int, Stage], world: Communicator, device: torch.device
) -> None:
    """Compile the layers if `run.compile = true`; see `compile_layers`."""
    if config.run.compile is True:
        compile_layers(stages, world, device)


def compile_layers(stages: Mapping[int, Stage], world: Communicator, device: torch.device) -> None:
    """Prepare each layer so that it is compiled when it is first computed. Raise SharedInputError
    on all ranks if a rank has no compiler."""
    lacks = lacking(world, device)
    if lacks:
        raise SharedInputError(f"layers cannot be compiled: {lacks}; legal: run.compile = false")
    for block in _blocks(stages):
        block.compiled_by(compiler.BACKEND)


def is_compiled(stages: Mapping[int, Stage]) -> bool:
    """Return True if the layers of the stages are compiled graphs."""
    return any(block.is_compiled for block in _blocks(stages))


def measured(
    stages: Mapping[int, Stage], world: Communicator, device: torch.device, *, passes: int
) -> Decision:
    """Measure whether compiled layers save time, and return the result, which is the same on all
    ranks. `passes` is the number of microbatches that each layer still computes in this run.

    Each rank times the forward and backward of its first layer, without and with compilation; the
    slowest rank counts. The layers are compiled if this saves more seconds in the rest of the run
    than the compilation took. The measurement adds to the gradients; the caller sets them to zero.
    The layers themselves stay as they are.
    """
    bench = Bench(world, device, world.size)
    bench.over = max
    lacks = lacking(world, device)
    if lacks:
        return Decision(False, lacks)
    blocks = _blocks(stages)
    work = _work(next(iter(stages.values())), blocks[0]) if blocks else _nothing
    uses = int(bench.agreed(len(blocks))) * passes
    plain_s = bench.work_s(work)
    if plain_s * uses < LEAST_S:
        return Decision(False, f"the layers take about {plain_s * uses:.0f} s in this run")
    try:
        start = time.perf_counter()
        failure = _first_graph(blocks[:1], work)
        bench.finish()
        compile_s = bench.agreed(time.perf_counter() - start)
        for rank, text in enumerate(world.all_gather_object(failure)):
            if text:
                return Decision(False, f"rank {rank} cannot compile them: {text}")
        compiled_s = bench.work_s(work)
    finally:
        for block in blocks[:1]:
            block.uncompile()
    times = f"{compiled_s * 1e3:.3g} ms instead of {plain_s * 1e3:.3g} ms a layer"
    saved_s = (plain_s - compiled_s) * uses
    return Decision(saved_s > compile_s, f"{times}, compiled in {compile_s:.0f} s")


def _first_graph(blocks: list[Block], work: Callable[[], None]) -> str:
    """Compile the layers `blocks`, and do the work for the first time. Return the first line of the
    error if the compiler fails, else ""."""
    try:
        for block in blocks:
            block.compiled_by(compiler.BACKEND)
        work()
    except Exception as error:  # the compiler's errors have no common class
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _nothing() -> None:
    """Do nothing, on a rank without layers."""


def _work(stage: Stage, block: Block) -> Callable[[], None]:
    """Return a function that computes the forward and backward of a layer of the stage, on a random
    microbatch. It adds gradients to `main_grad`."""
    like = next(block.parameters())
    x = torch.randn(stage.boundary.shape, dtype=like.dtype, device=like.device, requires_grad=True)
    dy = torch.ones_like(x)
    context = Context(positions=stage.positions)

    def work() -> None:
        """Compute the layer forward and backward."""
        block(x, context).backward(dy)
        x.grad = None

    return work


def lacking(world: Communicator, device: torch.device) -> str:
    """Return which tool of torch's compiler the first rank lacks that lacks one; "" if every rank
    can compile. All ranks must call this function."""
    for rank, wanted in enumerate(world.all_gather_object(compiler.missing(device.type))):
        if wanted:
            return f"rank {rank} has no {wanted}"
    return ""


def _blocks(stages: Mapping[int, Stage]) -> list[Block]:
    """Return the layers of the stages, in order."""
    blocks = [block for stage in stages.values() for block in stage.layers.values()]
    return [block for block in blocks if isinstance(block, Block)]
