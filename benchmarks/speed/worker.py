"""One rank of one side: sets its model up, then trains steps on command.

    python -m benchmarks.speed.worker ptdmpi|TOOL SOCKET

Commands and replies are lines of JSON on a Unix socket. Between commands the rank sleeps in a read
of it; a barrier of MPI or gloo would keep a core busy that the other side is measured on.
"""

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from benchmarks.speed.case import Row, Variant
from ptdmpi.comm import launch


class Trainer(Protocol):
    """One rank of a side. A side that fails raises, and its ranks end together."""

    rank: int

    def batch(self, step: int) -> Any:
        """This rank's data of a step, made before the clock starts."""

    def step(self, step: int, batch: Any) -> float | None:
        """Train one step; its mean loss in nats, None on a rank that does not know it."""


def serve(
    stream: TextIO, trainer: Trainer, limits_s: Callable[[], tuple[float, float]] | None = None
) -> None:
    """Do what the commands say until there are no more. `limits_s` measures what this rank's step
    cannot do without, linear GEMMs and attention, alone; one side's are enough."""
    _say(stream, {"rank": trainer.rank, "pid": os.getpid()})
    for command in _commands(stream):
        match command:
            case {"steps": count, "first": first}:
                _say(stream, _train(trainer, range(first, first + count)))
            case {"profile": step}:
                _say(stream, {"table": _profile(trainer, step)})
            case {"limits": _} if limits_s is not None:
                _say(stream, {"limits_s": limits_s()})


def _train(trainer: Trainer, steps: range) -> dict[str, Any]:
    batches = [trainer.batch(step) for step in steps]
    begin_s = time.perf_counter()  # CLOCK_MONOTONIC: the same for all processes of a machine
    losses = [trainer.step(step, batch) for step, batch in zip(steps, batches, strict=True)]
    end_s = time.perf_counter()
    return {
        "begin_s": begin_s,
        "end_s": end_s,
        "losses": losses,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _profile(trainer: Trainer, step: int) -> str:
    from torch.profiler import ProfilerActivity, profile

    batch = trainer.batch(step)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        trainer.step(step, batch)
    averages = recorded.key_averages(group_by_input_shape=True)
    by_name = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
    by_shape = averages.table(
        sort_by="self_cpu_time_total", row_limit=40, max_shapes_column_width=90
    )
    return f"by operator\n{by_name}\nby operator and shapes\n{by_shape}\n"


def _say(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _commands(stream: TextIO) -> Iterator[dict[str, Any]]:
    while line := stream.readline():
        yield json.loads(line)


def builder(tool: str) -> Callable[[Row, Variant, int], Trainer]:
    """What sets one rank of `tool` up. Only that tool is imported: the others may not be there."""
    if tool == "deepspeed":
        from benchmarks.speed.others import deep_speed

        return deep_speed.trainer
    if tool == "torchtitan":
        from benchmarks.speed.others import stand_ins

        stand_ins.for_torchtitan()
        from benchmarks.speed.others import titan

        return titan.TitanTrainer
    if tool == "transformers":
        from benchmarks.speed.others import hugging_face

        return hugging_face.TransformersTrainer
    if tool == "megatron":
        from benchmarks.speed.others import megatron_core

        return megatron_core.MegatronTrainer
    from benchmarks.speed import plain_torch

    return plain_torch.trainer


def main() -> None:
    side, address = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")
        job = json.loads(stream.readline())
        row, variant = Row.from_json(job["row"]), Variant(**job["variant"])
        launch.prepare()
        if side == "ptdmpi":
            from benchmarks.speed import ours

            ours.run(row, lambda trainer: serve(stream, trainer, trainer.limits_s))
        else:
            from benchmarks.speed import plain_torch

            build = builder(side)
            plain_torch.run(
                row, job["store"], lambda rank: serve(stream, build(row, variant, rank))
            )


if __name__ == "__main__":
    main()
