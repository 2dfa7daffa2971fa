"""One rank of one of the compared trainers. The rank builds its model, and then trains steps when a
command asks for steps.

    python -m benchmarks.speed.worker ptdmpi|TOOL SOCKET

Commands and replies are lines of JSON on a Unix socket. Between commands the rank sleeps while it
reads from the socket. A rank that waits in a barrier of MPI or gloo would keep a core busy, on
which another trainer is measured.
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
    """One of the compared trainers, on one rank. If a rank raises an error, all ranks of this
    trainer end."""

    rank: int

    def batch(self, step: int) -> Any:
        """Return this rank's data for a step. `batch` is called before the clock starts."""

    def step(self, step: int, batch: Any) -> float | None:
        """Train one step and return its mean loss in nats; None on a rank that does not have the
        loss."""


def serve(
    stream: TextIO,
    trainer: Trainer,
    limits_s: Callable[[], tuple[float, float]] | None = None,
    profile: Callable[[int], dict[str, float]] | None = None,
) -> None:
    """Execute commands until the connection ends. `limits_s` measures lower bounds of the time of
    this rank's step, in seconds (`rounds.LeastTimes`). `profile` trains the step with the given
    number, and returns the seconds of each kind of work. Only the ranks of ptdmpi pass `limits_s`
    and `profile`."""
    _say(stream, {"rank": trainer.rank, "pid": os.getpid()})
    for command in _commands(stream):
        match command:
            case {"steps": count, "first": first}:
                _say(stream, _train(trainer, range(first, first + count)))
            case {"limits": _} if limits_s is not None:
                _say(stream, {"limits_s": limits_s()})
            case {"profile": step} if profile is not None:
                _say(stream, {"seconds": profile(step)})


def _train(trainer: Trainer, steps: range) -> dict[str, Any]:
    batches = [trainer.batch(step) for step in steps]
    # perf_counter reads CLOCK_MONOTONIC, which is the same for all processes on a machine
    begin_s = time.perf_counter()
    losses = [trainer.step(step, batch) for step, batch in zip(steps, batches, strict=True)]
    end_s = time.perf_counter()
    return {
        "begin_s": begin_s,
        "end_s": end_s,
        "losses": losses,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _say(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _commands(stream: TextIO) -> Iterator[dict[str, Any]]:
    while line := stream.readline():
        yield json.loads(line)


def builder(tool: str) -> Callable[[Row, Variant, int], Trainer]:
    """Return a function that builds the trainer of `tool` on one rank. The function imports only
    this tool, because other tools may not be installed."""
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
    """Run one rank of the trainer that the command line names."""
    side, address = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")
        job = json.loads(stream.readline())
        row = Row.from_json(job["row"])
        variant = Variant(**job["variant"])
        launch.prepare()
        if side == "ptdmpi":
            from benchmarks.speed import ours

            ours.run(row, lambda trainer: serve(stream, trainer, trainer.limits_s, trainer.profile))
        else:
            from benchmarks.speed import plain_torch

            build = builder(side)
            plain_torch.run(
                row, job["store"], lambda rank: serve(stream, build(row, variant, rank))
            )


if __name__ == "__main__":
    main()
