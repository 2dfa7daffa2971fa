"""`ptdmpi plan`: predict the layout, time and memory of a training run before it starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ptdmpi.base.say import note
from ptdmpi.config import InputError, load
from ptdmpi.config.choices import CONTEXT_METHODS, OFFLOADS, RECOMPUTE_MODES, SCHEDULES
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.presets import model_presets
from ptdmpi.config.section import MOST_BATCH, MOST_RANKS
from ptdmpi.plan.ask import layouts, write_layout
from ptdmpi.plan.layer.low_bit import CODES
from ptdmpi.plan.machine.names import legal_clusters
from ptdmpi.plan.search.search import HEADROOM, TIE
from ptdmpi.plan.show import table
from ptdmpi.plan.show.draw import check_picture
from ptdmpi.terminal.options import AS_JSON, PATH, Number, ShardGroup
from ptdmpi.terminal.program import Command

MOST_HEADROOM = 90  # the greatest legal value of --headroom, in percent
LEGAL_WITH_CONFIG = ("config", "ranks", "cluster", "as_json")
LAYOUT_OPTIONS = (
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        help="Default: the fastest of gpipe, 1f1b, interleaved; zb-h1 and zb-v only on request.",
    ),
    click.option("--recompute", type=click.Choice(RECOMPUTE_MODES), help="Default: the fastest."),
    click.option(
        "--recompute-layers",
        type=Number(1, MOST_BATCH),
        help="With --recompute full: recompute only this number of first layers; default: all.",
    ),
    click.option(
        "--context-method",
        type=click.Choice(CONTEXT_METHODS),
        help="How attention gets all positions if c > 1; default: the fastest; with --layout: "
        "all_gather.",
    ),
    click.option("--first-layers", type=Number(1, MOST_BATCH), help="Layers of the first stage."),
    click.option(
        "--uneven",
        is_flag=True,
        help="Also search layouts with a smaller first stage or partial recomputation; slower.",
    ),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Also divide norms among tensor ranks; default: the faster setting.",
    ),
    click.option(
        "--scatter-gather/--no-scatter-gather",
        default=None,
        help="Divide messages between stages among tensor ranks; default: the faster setting.",
    ),
    click.option(
        "--partition-activations/--no-partition-activations",
        default=False,
        help="Tensor ranks divide the inputs that full recomputation keeps; default: off.",
    ),
    click.option(
        "--dp-overlap/--no-dp-overlap",
        default=False,
        help="Overlap messages between data ranks with computation; default: off.",
    ),
    click.option("--zero", type=Number(0, 3), help="Default: the fastest; with --layout: 0."),
    click.option(
        "--shard-group",
        type=ShardGroup(),
        help="With ZeRO: data ranks that share one copy of the state (all, node or a number); "
        "default as for --zero.",
    ),
    click.option(
        "--offload",
        type=click.Choice(OFFLOADS),
        help="Default: the fastest; with --layout: none.",
    ),
)


def _layout_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(LAYOUT_OPTIONS):
        function = option(function)
    return function


@click.command("plan", cls=Command)
@click.argument("config", required=False, type=PATH)
@click.option("--model", help="A preset[,s=8192], or l=96,h=12288,a=96[,s=2048,V=51200].")
@click.option("--cluster", help=f"{legal_clusters()}, or a .toml file.")
@click.option(
    "--ranks", type=Number(1, MOST_RANKS), help="Number of ranks; not needed if --layout has d."
)
@click.option(
    "--batch", type=Number(1, MOST_BATCH), help="Sequences per step; default: the preset's."
)
@click.option(
    "--headroom",
    type=Number(0, MOST_HEADROOM),
    default=HEADROOM,
    show_default=True,
    metavar="PERCENT",
    help="Percentage of each device's memory that the search keeps free.",
)
@click.option(
    "--order",
    type=click.Choice(layouts.ORDERS),
    default=layouts.ORDERS[0],
    show_default=True,
    help=f"Layout that is listed first: the simplest within {TIE:.0%} of the fastest time, or the "
    "fastest.",
)
@click.option(
    "--layout", help="Predict this layout, such as t=8,p=8,d=1,v=3,b=1, without a search."
)
@click.option("--why", metavar="LAYOUT", help="Compare a layout with the best one.")
@_layout_options
@click.option(
    "--precision",
    help=f"{', '.join(PRECISIONS)}; default: bf16, or fp16 if the cluster has no bf16.",
)
@click.option("--lora", type=Number(1, MOST_BATCH), help="Train only adapters of this rank.")
@click.option(
    "--base-bits", type=click.Choice(CODES), help="With --lora: quantize the frozen matrices."
)
@click.option(
    "--base-block", type=Number(2, 2**20), help="With --base-bits: elements per scale; default 64."
)
@click.option(
    "--tokens", type=Number(), help="Tokens to train on; adds days and rank-hours to the output."
)
@click.option("--png", metavar="FILE", help="Draw the step of the first layout (.png or .svg).")
@click.option(
    "--memory-png", metavar="FILE", help="Draw the memory of the first layout (.png or .svg)."
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Write the step of the first layout as a trace for Perfetto or chrome://tracing.",
)
@click.option(
    "--write", metavar="FILE", type=PATH, help="Write a configuration with the first layout."
)
@AS_JSON
def command(
    config: Path | None,
    *,
    model: str | None,
    cluster: str | None,
    write: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the time and the memory of a model's layouts on a cluster, and what they are spent
    on.

    With CONFIG, a configuration file for ptdmpi train, the command previews that run instead, like
    ptdmpi train --dry-run: it shows the data, sizes, memory, time and first batch. CONFIG can be
    combined only with --ranks, --cluster and --json. Nothing is written, and MPI is not needed.
    """
    if config is not None:
        _preview(config, cluster, options["ranks"], as_json)
        return
    if model is None or cluster is None:
        raise InputError("give --model and --cluster, or a configuration to preview")
    files = {name: options.pop(name) for name in ("png", "memory_png", "trace")}
    for picture in (files["png"], files["memory_png"]):
        if picture is not None:
            check_picture(picture)
    request = layouts.LayoutRequest(model, cluster, **options)
    if write is not None:
        write_layout.check(write, request)
    plan = layouts.answer(request)
    plan.draw(files["png"], files["memory_png"], files["trace"])
    if write is not None:
        write_layout.write(write, request, plan)
    click.echo(json.dumps(plan.numbers) if as_json else table.report(plan.numbers))


def _preview(config: Path, cluster: str | None, ranks: int | None, as_json: bool) -> None:
    """Print the preview of a configuration (data, sizes, memory, step time and first batch). No run
    is started. Raise InputError if `config` is the name of a preset, or if the command line has an
    option that only the search for layouts uses."""
    if str(config) in model_presets() and not config.exists():
        raise InputError(
            f"{config} is a preset, not a configuration file; for its layouts: ptdmpi plan --model "
            f"{config} --cluster NAME --ranks N"
        )
    options = _options_of_the_search()
    if options:
        raise InputError(
            f"{', '.join(options)}: cannot be combined with {config}; legal with a configuration: "
            "--ranks, --cluster, --json"
        )
    note("ptdmpi plan: checking configuration, data and memory")
    from ptdmpi.preview.dry_run import show

    show(load(config), ranks, cluster=cluster, as_json=as_json)


def _options_of_the_search() -> list[str]:
    """Return the options on the command line that cannot be combined with a configuration."""
    context = click.get_current_context()
    return [
        param.opts[0]
        for param in context.command.params
        if param.expose_value
        and param.name not in LEGAL_WITH_CONFIG
        and context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]
