"""`ptdmpi plan`: which layout, how long, how much memory, and why; before a node-hour is spent."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ptdmpi.base.words import counted
from ptdmpi.config import AdaptConfig, InputError, QuantizeConfig, load
from ptdmpi.config.layout import Layout, complete, parse
from ptdmpi.config.legality import OFFLOADS, RECOMPUTE_MODES, SCHEDULES, CodesName
from ptdmpi.config.presets import recipe
from ptdmpi.config.section import MOST_BATCH, MOST_RANKS
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.machine.cluster import (
    Cluster,
    Model,
    cluster_names,
    load_cluster,
    load_model,
    preset_and_keys,
)
from ptdmpi.plan.search.advice import (
    difference,
    heuristic,
    improvements,
    microbatch_model,
)
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space, contradiction, of_a_node
from ptdmpi.plan.shape.low_bit import CODES
from ptdmpi.plan.shape.parameters import parameter_count
from ptdmpi.plan.show import draw, draw_memory, table
from ptdmpi.plan.show.trace import chrome_trace
from ptdmpi.terminal.program import Command
from ptdmpi.terminal.say import note

MOST_DRAWN = 10_000  # microbatches of a step
BESIDE_CONFIG = ("config", "ranks", "cluster", "as_json")
SETTINGS = (
    "schedule",
    "recompute",
    "recompute_layers",
    "sequence_parallel",
    "scatter_gather",
    "first_layers",
    "uneven",
    "zero",
    "shard_group",
    "offload",
    "partition_activations",
    "dp_overlap",
)


class Number(click.types.FloatParamType):
    """A whole number of `least` to `most`, or any above 0; one line for anything else."""

    name = "number"

    def __init__(self, least: int | None = None, most: int = 0) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            number = float(value) if self.least is None else int(value)
        except ValueError:
            number = math.nan
        below = number <= 0 if self.least is None else number < self.least
        if math.isfinite(number) and not below and not (self.most and number > self.most):
            return number
        legal = "a finite number above 0"
        if self.least is not None:
            legal = f"a whole number, {self.least} to {self.most:,}"
        raise InputError(f"{param.opts[0]} {value}: must be {legal}")


class ShardGroup(click.ParamType[int | str]):
    """ "all", "node" or how many ranks."""

    name = "group"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        if value in ("all", "node"):
            return str(value)
        if not str(value).isdigit() or int(value) < 1:
            raise InputError(f'--shard-group {value}: must be "all", "node" or a number from 1')
        return int(value)


SWITCHES = (
    ("sequence-parallel", None, "Shard norms over the tensor axis too; default: the faster."),
    ("scatter-gather", None, "Send each tensor rank's part between stages; default: the faster."),
    (
        "partition-activations",
        False,
        "Divide what full recomputation keeps over the tensor axis; default: off.",
    ),
    ("dp-overlap", False, "Data axis' messages go behind computing; default: off."),
)


def _options(function: Any) -> Any:
    for name, default, text in reversed(SWITCHES):
        function = click.option(f"--{name}/--no-{name}", default=default, help=text)(function)
    return function


def _check(options: dict[str, Any]) -> None:
    """Raises InputError for options that contradict each other."""
    if options["recompute_layers"] and options["recompute"] != "full":
        raise InputError("--recompute-layers belongs to --recompute full")
    if options["uneven"] and (options["layout"] or options["first_layers"]):
        raise InputError(
            "--uneven searches; a --layout and --first-layers say which: leave one of them out"
        )


@click.command("plan", cls=Command)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="A preset[,s=8192], or l=96,h=12288,a=96[,s=2048,V=51200].")
@click.option("--cluster", help=f"{', '.join(cluster_names())}, or a .toml file.")
@click.option("--ranks", type=Number(1, MOST_RANKS), help="How many; in --layout d may say it.")
@click.option(
    "--batch", type=Number(1, MOST_BATCH), help="Sequences per step; default: as published."
)
@click.option("--layout", help="Price t=8,p=8,d=1,v=3,b=1 instead of searching.")
@click.option("--why", metavar="LAYOUT", help="Explain a layout beside the best one.")
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="Default: the fastest of gpipe, 1f1b, interleaved; zb-h1, zb-v where asked for.",
)
@click.option("--recompute", type=click.Choice(RECOMPUTE_MODES), help="Default: the fastest.")
@click.option(
    "--recompute-layers", type=Number(1, MOST_BATCH), help="Of full: the first so many; else all."
)
@click.option("--first-layers", type=Number(1, MOST_BATCH), help="Of the first stage.")
@click.option(
    "--uneven",
    is_flag=True,
    help="Search first stages of fewer layers, and pipelines that recompute some; slower.",
)
@_options
@click.option("--zero", type=Number(0, 3), help="Default: the fastest; of a --layout 0.")
@click.option("--shard-group", type=ShardGroup(), help="all, node or a number; default as --zero.")
@click.option(
    "--offload", type=click.Choice(OFFLOADS), help="Default: the fastest; of a --layout none."
)
@click.option(
    "--precision",
    help="fp16, bf16, fp32 or fp64; default: the first that the cluster has of bf16, fp16.",
)
@click.option("--lora", type=Number(1, MOST_BATCH), help="Train adapters of this rank alone.")
@click.option("--base-bits", type=click.Choice(CODES), help="Of --lora: its frozen matrices.")
@click.option("--base-block", type=Number(2, 2**20), help="Elements with one scale; default 64.")
@click.option("--tokens", type=Number(), help="Of the whole training: adds days and rank-hours.")
@click.option("--png", metavar="FILE", help="Draw the step of the first layout (.png or .svg).")
@click.option("--memory-png", metavar="FILE", help="Draw its memory over time (.png or .svg).")
@click.option("--trace", metavar="FILE", help="Write its trace for Perfetto or chrome://tracing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    config: Path | None,
    model: str | None,
    cluster: str | None,
    batch: int | None,
    **options: Any,
) -> None:
    """Predict layouts of a model on a cluster: time, memory, and what they are spent on.

    With CONFIG, a file for ptdmpi train, it previews that run instead, as ptdmpi train --dry-run
    does: data, sizes, memory, time, the first batch. Of the options --ranks, --cluster and --json
    go with it; nothing is written, and no MPI is needed.
    """
    as_json: bool = options.pop("as_json")
    if config is not None:
        _preview(config, cluster, options["ranks"], as_json)
        return
    if model is None or cluster is None:
        raise InputError("give --model and --cluster, or a configuration to preview")
    for key in ("png", "memory_png"):
        if options[key] is not None:
            draw.check_picture(options[key])
    base = options.pop("lora"), options.pop("base_bits"), options.pop("base_block")
    machine, shape = load_cluster(cluster), _adapted(load_model(model), *base)
    batch = batch or published_batch(model)
    pricer = Pricer(machine, shape, batch, options["precision"] or usual_precision(machine))
    chosen = options["layout"] or options["why"]
    given = _layout(pricer, chosen, options) if chosen else None
    _check(options)
    zero = options.pop("zero")
    options["zero"] = Space.zero if zero is None else (zero,)
    if given is not None:
        options["ranks"] = given.ranks
    elif options["ranks"] is None:
        raise InputError("give --ranks, or a --layout with d")
    space = Space(options["ranks"], **{key: options[key] for key in SETTINGS})
    fixed = given if options["layout"] else None
    if fixed is None and (found := contradiction(space)):
        raise InputError(found)
    doing = "searching layouts" if fixed is None else f"pricing {fixed}"
    where = f"{counted(options['ranks'], 'rank')} of {machine.name}"
    note(f"ptdmpi plan: {doing} of {shape.name} on {where}, batch {batch}")
    prices = search(pricer, space) if fixed is None else [pricer.price(fixed)]
    result: dict[str, Any] = {
        "model": pricer.model.name,
        "parameters": parameter_count(pricer.model.config, pricer.model.vocab_size),
        "cluster": machine.name,
        "ranks": options["ranks"],
        "batch": batch,
        "seq_length": pricer.model.config.seq_length,
        "precision": pricer.machine.dtype,
        "layouts": [table.numbers(price, pricer, options["tokens"]) for price in prices],
    }
    if options["why"] and given is not None:
        result["why"] = _why(pricer, given, prices[0])
    elif not options["layout"]:
        result |= _beside(pricer, space, prices[0])
    result["train"] = _train(pricer, prices[0].layout)
    _draw(pricer, prices[0].layout, options)
    click.echo(json.dumps(result) if as_json else table.report(result))


def _adapted(shape: Model, rank: int | None, codes: CodesName | None, block: int | None) -> Model:
    """The model, or itself frozen beneath LoRA of this rank, its matrices in such codes. Raises
    InputError for options that do not go together."""
    if codes is not None and rank is None:
        raise InputError("--base-bits belongs to --lora")
    if block is not None and (codes is None or block % 2):
        raise InputError(f"--base-block {block} belongs to --base-bits, and is even")
    if rank is None:
        return shape
    quantize = None if codes is None else QuantizeConfig(weights=codes, block=block or 64)
    adapt = AdaptConfig(method="lora", rank=rank)
    return replace(shape, config=shape.config.adapted(adapt, quantize))


def _preview(config: Path, cluster: str | None, ranks: int | None, as_json: bool) -> None:
    context = click.get_current_context()
    given = [
        one.opts[0]
        for one in context.command.params
        if one.expose_value
        and one.name not in BESIDE_CONFIG
        and context.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise InputError(
            f"{', '.join(given)}: {config} says what is previewed; legal beside a configuration: "
            "--ranks, --cluster, --json"
        )
    note("ptdmpi plan: checking configuration, data and memory")
    from ptdmpi.preview.dry_run import show

    show(load(config), ranks, cluster, as_json)


def published_batch(model: str) -> int:
    """Sequences per step that the preset's source states. Raises InputError if it states none."""
    preset, keys = preset_and_keys(model)
    # sequences of another length are another batch
    known = preset is not None and "seq_length" not in keys
    batch = recipe(preset)["batch"].get("global_size") if preset and known else None
    if batch is None:
        raise InputError(f"give --batch, sequences per step: none is published of model {model}")
    return batch


def usual_precision(machine: Cluster) -> str:
    """The first that the machine has of bf16, fp16, or any."""
    known = machine.device.peak_flops
    return next((name for name in ("bf16", "fp16") if name in known), next(iter(known)))


def _layout(pricer: Pricer, text: str, options: dict[str, Any]) -> Layout:
    """The layout asked for; sequence parallelism and scatter/gather, where not said, as is fastest
    of what fits."""
    settings = {key: options[key] for key in SETTINGS if key != "uneven"}
    group = settings.pop("shard_group")
    layout = complete(parse(text), options["ranks"], **settings)
    if group is not None:
        number = {"all": layout.data, "node": of_a_node(pricer, layout)}.get(group, group)
        layout = replace(layout, shard_group=None if number == layout.data else number)
    found = list(layout.mistakes(pricer.model.config, pricer.batch))
    if found:
        raise InputError(f"layout {layout}: {'; '.join(found)}")
    tried = [layout]
    for key in ("sequence_parallel", "scatter_gather"):
        if options[key] is None and layout.tensor > 1:
            switched: dict[str, Any] = {key: not getattr(layout, key)}
            tried += [replace(one, **switched) for one in tried]
    legal = (one for one in tried if one.is_legal(pricer.model.config, pricer.batch))
    prices = [pricer.price(one) for one in legal]
    return min(prices, key=lambda price: (not price.fits, price.step_time_s)).layout


def _why(pricer: Pricer, layout: Layout, best: Price) -> dict[str, Any]:
    """The layout's own numbers, the part of a step that differs most from the best one's, and the
    changes that help most, few at once."""
    price = pricer.price(layout)
    parts, best_parts = asdict(price.parts), asdict(best.parts)
    differences = {part: parts[part] - best_parts[part] for part in parts}
    most = max(differences, key=lambda part: abs(differences[part]))
    at_once, found = improvements(price, pricer)
    changes = [
        {"change": difference(layout, other.layout), **table.numbers(other, pricer, None)}
        for other in found
    ]
    return {
        "layout": table.numbers(price, pricer, None),
        "slower_than_best": price.step_time_s / best.step_time_s - 1,
        "largest_difference": {"part": most, "seconds": differences[most]},
        "changes_at_once": at_once,
        "changes": changes,
    }


def _beside(pricer: Pricer, space: Space, best: Price) -> dict[str, Any]:
    """What the paper's rules would have chosen, and its model of the microbatch."""
    ruled = heuristic(pricer, space)
    times = microbatch_model(pricer, best.layout)
    return {
        "heuristic": None if ruled is None else table.numbers(ruled, pricer, None),
        "microbatch_model": {
            "b": min(times, key=lambda size: times[size]),
            "simulated_b": best.layout.micro_size,
            "seconds": times,
        },
    }


def _train(pricer: Pricer, layout: Layout) -> dict[str, dict[str, Any]] | None:
    """Sections of a configuration that trains so; None where `ptdmpi train` does not."""
    if layout.dp_overlap:
        return None
    preset, keys = preset_and_keys(pricer.model.name)
    keys.pop("vocab_size", None)  # of the data
    sections: dict[str, dict[str, Any]] = {"model": {"preset": preset, **keys}} if preset else {}
    adapt = pricer.model.config.adapt
    if adapt.adapts:
        sections["adapt"] = {"method": adapt.method, "rank": adapt.rank}
    quantize = pricer.model.config.quantize
    if quantize.weights != "none":
        sections["quantize"] = quantize.model_dump()
    sections |= {"precision": {"compute": pricer.machine.dtype}, **layout.sections()}
    sections["batch"] = {"global_size": pricer.batch, **sections["batch"]}
    return sections


def _draw(pricer: Pricer, layout: Layout, options: dict[str, Any]) -> None:
    if not any(options[key] for key in ("png", "memory_png", "trace")):
        return
    microbatches = layout.microbatches(pricer.batch)
    if microbatches > MOST_DRAWN:
        raise InputError(
            f"layout {layout}: a step of {microbatches} microbatches is too long to be drawn; "
            f"give a --batch of at most {MOST_DRAWN * layout.data * layout.micro_size}"
        )
    if options["memory_png"] is not None:
        draw_memory.draw(pricer, layout, options["memory_png"])
    if options["png"] is None and options["trace"] is None:
        return
    title = f"{pricer.model.name} on {pricer.cluster.name}: {layout}, {layout.schedule}"
    timeline = pricer.timeline(layout, title)
    if options["png"] is not None:
        draw.figure([timeline], options["png"])
    if options["trace"] is not None:
        chrome_trace(timeline, options["trace"])
