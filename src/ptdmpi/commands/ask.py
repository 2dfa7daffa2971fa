"""`ptdmpi ask`: what people ask before they spend node-hours, each with a short answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ptdmpi.commands.plan import Number, published_batch, usual_precision
from ptdmpi.config import InputError
from ptdmpi.config.layout import complete, parse
from ptdmpi.config.section import MOST_BATCH, MOST_RANKS
from ptdmpi.plan.ask import inverse, methods, network, partition, restarts, sweep
from ptdmpi.plan.ask.answer import Reply
from ptdmpi.plan.ask.ranks import answer as cheapest
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import cluster_names, load_cluster, load_model
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.show.draw import check_picture
from ptdmpi.terminal.program import CommandGroup
from ptdmpi.terminal.say import note

MODEL = click.option("--model", required=True, help="A preset[,s=8192], or l=96,h=12288,a=96.")
CLUSTER = click.option(
    "--cluster", required=True, help=f"{', '.join(cluster_names())}, or a .toml file."
)
RANKS = click.option("--ranks", required=True, type=Number(1, MOST_RANKS), help="How many.")
BATCH = click.option(
    "--batch", type=Number(1, MOST_BATCH), help="Sequences per step; default: as published."
)
TOKENS = click.option("--tokens", required=True, type=Number(), help="Of the whole training.")


class SizeList(click.ParamType[list[int]]):
    """Whole numbers with commas between them."""

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        parts = str(value).split(",")
        if not all(part.isdigit() and 1 <= int(part) <= MOST_BATCH for part in parts):
            raise InputError(f"{param.opts[0]} {value}: must be numbers from 1, such as 256,512")
        return sorted(set(map(int, parts)))


def _told(function: Callable[..., Reply]) -> Any:
    """A question with its ways to be answered: text, --json, --png."""

    def tell(as_json: bool, png: Path | None, **options: Any) -> None:
        if png is not None:
            check_picture(png)
        answer = function(**options)
        if png is not None:
            answer.draw(png)
        click.echo(json.dumps(answer.numbers) if as_json else answer.text())

    tell.__doc__ = function.__doc__
    picture = click.Path(path_type=Path)
    as_png = click.option("--png", type=picture, help="Draw the answer (.png or .svg).")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
    return as_png(as_json(tell))


def _pricer(model: str, cluster: str, batch: int | None = None) -> Pricer:
    machine = load_cluster(cluster)
    size = batch or published_batch(model)
    return Pricer(machine, load_model(model), size, usual_precision(machine))


@click.group(cls=CommandGroup, short_help="Cost, deadline, restarts, network, sizes: answers.")
def command() -> None:
    """Answer what is asked before node-hours are spent, by the predictions of ptdmpi plan.

    docs/explanation/questions.md has an example of each, with its picture.
    """


@command.command("ranks")
@MODEL
@CLUSTER
@click.option("--ranks", required=True, type=Number(1, MOST_RANKS), help="At most so many.")
@BATCH
@TOKENS
@click.option("--days", type=Number(), help="The deadline.")
@click.option("--price", type=Number(), help="Of a rank-hour, in your currency.")
@_told
def how_many(
    model: str,
    cluster: str,
    ranks: int,
    batch: int | None,
    tokens: float,
    days: float | None,
    price: float | None,
) -> Reply:
    """How many ranks: the cheapest by a deadline."""
    return cheapest(_pricer(model, cluster, batch), ranks, tokens, days, price)


@command.command("restarts")
@MODEL
@CLUSTER
@RANKS
@BATCH
@click.option("--node-days", required=True, type=Number(), help="Between failures of one node.")
@click.option("--write-gb-s", required=True, type=Number(), help="Of the file system, GB/s.")
@click.option("--restart-minutes", required=True, type=Number(), help="Failure to first step.")
@_told
def how_often(
    model: str,
    cluster: str,
    ranks: int,
    batch: int | None,
    node_days: float,
    write_gb_s: float,
    restart_minutes: float,
) -> Reply:
    """How often to save, and what failures cost."""
    pricer = _pricer(model, cluster, batch)
    note("ptdmpi ask: searching the layout, whose steps are counted")
    step_s = search(pricer, Space(ranks), 1)[0].step_time_s
    told = (node_days, write_gb_s * 1e9, restart_minutes * 60)
    return restarts.answer(pricer, ranks, step_s, *told)


@command.command("network")
@MODEL
@CLUSTER
@RANKS
@BATCH
@click.option("--pod", type=Number(1, MOST_RANKS), help="Nodes that share the full rate.")
@_told
def what_if(model: str, cluster: str, ranks: int, batch: int | None, pod: int | None) -> Reply:
    """A slower, tapered or two-tier network."""
    return network.answer(_pricer(model, cluster, batch), ranks, pod)


@command.command("sweep")
@MODEL
@CLUSTER
@RANKS
@BATCH
@click.option("--batches", type=SizeList(), help="Sequences per step, such as 256,512,1024.")
@click.option("--lengths", type=SizeList(), help="Sequence lengths; as many tokens in a step.")
@_told
def over(
    model: str,
    cluster: str,
    ranks: int,
    batch: int | None,
    batches: list[int] | None,
    lengths: list[int] | None,
) -> Reply:
    """Other batches or sequence lengths."""
    if (batches is None) == (lengths is None):
        raise InputError("give --batches or --lengths, one of the two")
    if batches is not None:
        pricer = _pricer(model, cluster, batch or batches[0])
        return sweep.answer(sweep.batches(pricer, batches), ranks, "batch")
    assert lengths is not None
    pricer = _pricer(model, cluster, batch)
    return sweep.answer(sweep.lengths(pricer, lengths), ranks, "sequence length")


@command.command("partition")
@MODEL
@CLUSTER
@click.option("--tensor", required=True, type=Number(2, MOST_RANKS), help="t.")
@click.option("--micro-size", default=1, type=Number(1, MOST_BATCH), help="b; default: 1.")
@_told
def why(model: str, cluster: str, tensor: int, micro_size: int) -> Reply:
    """Why weights are cut by columns, then rows."""
    return partition.answer(_pricer(model, cluster, 1), tensor, micro_size)


@command.command("methods")
@MODEL
@CLUSTER
@click.option("--ranks", type=Number(1, MOST_RANKS), help="How many; in --layout d may say it.")
@click.option("--layout", help="Such as t=8,p=8,d=4,b=1; default: the fastest with zero = 0.")
@BATCH
@_told
def less(
    model: str, cluster: str, ranks: int | None, layout: str | None, batch: int | None
) -> Reply:
    """Decentralised, local, compressed: what each saves."""
    pricer = _pricer(model, cluster, batch)
    if layout is not None:
        chosen = complete(parse(layout), ranks)
        if mistakes := list(chosen.mistakes(pricer.model.config, pricer.batch)):
            raise InputError(f"layout {layout}: {'; '.join(mistakes)}")
        return methods.answer(pricer, chosen)
    if ranks is None:
        raise InputError("give --ranks, or a --layout with d")
    note("ptdmpi ask: searching the layout, whose replicas tell each other less")
    return methods.answer(pricer, search(pricer, Space(ranks, zero=(0,)), 1)[0].layout)


@command.command("days")
@MODEL
@CLUSTER
@RANKS
@TOKENS
@click.option("--days", type=Number(), help="That a training took: says the utilisation.")
@click.option("--utilisation", type=Number(), help="Share of the peak, such as 0.4: says the days.")
@_told
def inverse_of(
    model: str,
    cluster: str,
    ranks: int,
    tokens: float,
    days: float | None,
    utilisation: float | None,
) -> Reply:
    """Utilisation from days, days from utilisation."""
    return inverse.days_answer(_pricer(model, cluster, 1), ranks, tokens, days, utilisation)


@command.command("size")
@click.option("--flops", required=True, type=Number(), help="Of the whole training.")
@_told
def how_large(flops: float) -> Reply:
    """The size of a model for a budget."""
    return inverse.size_answer(flops)
