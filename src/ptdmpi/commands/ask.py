"""`ptdmpi ask`: short answers to questions about cost, time and network before a training run."""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ptdmpi.base.say import note
from ptdmpi.config import InputError
from ptdmpi.config.layout import complete, parse
from ptdmpi.config.section import MOST_BATCH, MOST_RANKS
from ptdmpi.plan.ask import inverse, methods, network, partition, restarts, sweep
from ptdmpi.plan.ask.answer import Reply
from ptdmpi.plan.ask.defaults import pricer_of_names
from ptdmpi.plan.ask.ranks import answer as cheapest
from ptdmpi.plan.layer.legality import layout_mistakes
from ptdmpi.plan.machine.names import legal_clusters
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.show.draw import check_picture
from ptdmpi.terminal.options import AS_JSON, PATH, Number, NumberList
from ptdmpi.terminal.program import CommandGroup

MODEL = click.option("--model", required=True, help="A preset[,s=8192], or l=96,h=12288,a=96.")
CLUSTER = click.option("--cluster", required=True, help=f"{legal_clusters()}, or a .toml file.")
RANKS = click.option("--ranks", required=True, type=Number(1, MOST_RANKS), help="Number of ranks.")
BATCH = click.option(
    "--batch", type=Number(1, MOST_BATCH), help="Sequences per step; default: the preset's."
)
TOKENS = click.option("--tokens", required=True, type=Number(), help="Tokens to train on.")


def _answered(question: Callable[..., Reply]) -> Any:
    """Turn a function that returns a `Reply` into a command that prints the reply. With the option
    --json the command prints JSON, and with --png the command also draws the reply.
    """

    @wraps(question)
    def answer(as_json: bool, png: Path | None, **options: Any) -> None:
        """Print the reply to the question, and draw it if --png is given."""
        if png is not None:
            check_picture(png)
        reply = question(**options)
        if png is not None:
            reply.draw(png)
        click.echo(json.dumps(reply.numbers) if as_json else reply.text())

    as_png = click.option("--png", type=PATH, help="Draw the answer (.png or .svg).")
    return as_png(AS_JSON(answer))


@click.group(cls=CommandGroup)
def command() -> None:
    """Answer questions about a training run before node-hours are spent, with the predictions of
    ptdmpi plan.

    docs/explanation/questions.md has an example of each question, with a picture.
    """


@command.command("ranks")
@MODEL
@CLUSTER
@click.option("--ranks", required=True, type=Number(1, MOST_RANKS), help="Maximum number of ranks.")
@BATCH
@TOKENS
@click.option("--days", type=Number(), help="Deadline in days.")
@click.option("--price", type=Number(), help="Price of a rank-hour.")
@_answered
def ranks_command(
    *,
    model: str,
    cluster: str,
    ranks: int,
    batch: int | None,
    tokens: float,
    days: float | None,
    price: float | None,
) -> Reply:
    """Find the cheapest number of ranks that meets a deadline."""
    return cheapest(pricer_of_names(model, cluster, batch), ranks, tokens, days=days, price=price)


@command.command("restarts")
@MODEL
@CLUSTER
@RANKS
@BATCH
@click.option("--node-days", required=True, type=Number(), help="Days between failures of a node.")
@click.option("--write-gb-s", required=True, type=Number(), help="Write rate of the file system.")
@click.option(
    "--restart-minutes",
    required=True,
    type=Number(),
    help="Minutes from a failure to the next step.",
)
@_answered
def restarts_command(
    *,
    model: str,
    cluster: str,
    ranks: int,
    batch: int | None,
    node_days: float,
    write_gb_s: float,
    restart_minutes: float,
) -> Reply:
    """Find the best checkpoint interval, and the cost of failures."""
    pricer = pricer_of_names(model, cluster, batch)
    note("ptdmpi ask: searching for the fastest layout, to predict the time of a step")
    step_s = search(pricer, Space(ranks), 1)[0].step_time_s
    return restarts.answer(
        pricer,
        ranks,
        step_time_s=step_s,
        node_days=node_days,
        bytes_per_s=write_gb_s * 1e9,
        restart_s=restart_minutes * 60,
    )


@command.command("network")
@MODEL
@CLUSTER
@RANKS
@BATCH
@click.option(
    "--pod", type=Number(1, MOST_RANKS), help="Nodes of a pod, which communicate at full rate."
)
@_answered
def network_command(
    *, model: str, cluster: str, ranks: int, batch: int | None, pod: int | None
) -> Reply:
    """Predict step times on slower and faster networks, and with slow links between pods."""
    return network.answer(pricer_of_names(model, cluster, batch), ranks, pod)


@command.command("sweep")
@MODEL
@CLUSTER
@RANKS
@BATCH
@click.option("--batches", type=NumberList(), help="Sequences per step, such as 256,512,1024.")
@click.option(
    "--lengths",
    type=NumberList(),
    help="Sequence lengths, with the same number of tokens per step.",
)
@_answered
def sweep_command(
    *,
    model: str,
    cluster: str,
    ranks: int,
    batch: int | None,
    batches: list[int] | None,
    lengths: list[int] | None,
) -> Reply:
    """Predict step times for other batch sizes or sequence lengths."""
    if (batches is None) == (lengths is None):
        raise InputError("give either --batches or --lengths")
    if batches is not None:
        pricer = pricer_of_names(model, cluster, batch or batches[0])
        return sweep.answer(sweep.batches(pricer, batches), ranks, "batch")
    assert lengths is not None
    pricer = pricer_of_names(model, cluster, batch)
    return sweep.answer(sweep.lengths(pricer, lengths), ranks, "sequence length")


@command.command("partition")
@MODEL
@CLUSTER
@click.option("--tensor", required=True, type=Number(2, MOST_RANKS), help="Number of tensor ranks.")
@click.option("--micro-size", default=1, type=Number(1, MOST_BATCH), help="Micro-batch size.")
@_answered
def partition_command(model: str, cluster: str, tensor: int, micro_size: int) -> Reply:
    """Explain why an MLP is split by columns first, then by rows."""
    return partition.answer(pricer_of_names(model, cluster, 1), tensor, micro_size)


@command.command("methods")
@MODEL
@CLUSTER
@click.option(
    "--ranks", type=Number(1, MOST_RANKS), help="Number of ranks; not needed if --layout has d."
)
@click.option(
    "--layout", help="A layout such as t=8,p=8,d=4,b=1; default: the fastest without ZeRO."
)
@BATCH
@_answered
def methods_command(
    *, model: str, cluster: str, ranks: int | None, layout: str | None, batch: int | None
) -> Reply:
    """Predict how much time communication-efficient methods save."""
    pricer = pricer_of_names(model, cluster, batch)
    if layout is not None:
        chosen = complete(parse(layout), ranks)
        if mistakes := list(layout_mistakes(chosen, pricer.model.config, pricer.batch)):
            raise InputError(f"layout {layout}: {'; '.join(mistakes)}")
        return methods.answer(pricer, chosen)
    if ranks is None:
        raise InputError("give --ranks, or a --layout with d")
    note("ptdmpi ask: searching for the fastest layout without ZeRO")
    return methods.answer(pricer, search(pricer, Space(ranks, zero=(0,)), 1)[0].layout)


@command.command("days")
@MODEL
@CLUSTER
@RANKS
@TOKENS
@click.option("--days", type=Number(), help="Days that a training took; prints its utilisation.")
@click.option(
    "--utilisation",
    type=Number(),
    help="Fraction of the peak FLOP/s, such as 0.4; prints the days.",
)
@_answered
def days_command(
    *,
    model: str,
    cluster: str,
    ranks: int,
    tokens: float,
    days: float | None,
    utilisation: float | None,
) -> Reply:
    """Convert days to utilisation, or utilisation to days."""
    pricer = pricer_of_names(model, cluster, 1)
    return inverse.days_answer(pricer, ranks, tokens, taken=days, utilisation=utilisation)


@command.command("size")
@click.option("--flops", required=True, type=Number(), help="FLOPs of the training.")
@_answered
def size_command(flops: float) -> Reply:
    """Find the best model size for a budget of FLOPs."""
    return inverse.size_answer(flops)
