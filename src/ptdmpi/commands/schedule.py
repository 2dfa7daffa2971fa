"""`ptdmpi schedule`: draw a pipeline schedule, and print its bubble and its peak activations."""

import json
import os
import shutil
import sys
from dataclasses import replace
from typing import Any

import click

from ptdmpi.config import InputError
from ptdmpi.config.choices import default_schedule
from ptdmpi.config.legality import MOST_FORWARDS
from ptdmpi.plan.schedule.orders import KINDS, Schedule, build
from ptdmpi.plan.schedule.simulate import Costs, Timeline, simulate
from ptdmpi.plan.show import draw
from ptdmpi.plan.show.trace import chrome_trace
from ptdmpi.terminal.options import AS_JSON
from ptdmpi.terminal.program import Command


@click.command("schedule", cls=Command)
@click.option("--kind", help=f"{', '.join(KINDS)}; default: 1f1b at v=1, else interleaved.")
@click.option("-p", "--pipeline", type=int, required=True, help="Pipeline ranks.")
@click.option(
    "-v", "--virtual", type=int, default=1, show_default=True, help="Model chunks per rank."
)
@click.option("-m", "--microbatches", type=int, required=True, help="Microbatches per step.")
@click.option("--forward-cost", type=float, default=1.0, show_default=True, help="For one chunk.")
@click.option("--backward-cost", type=float, default=2.0, show_default=True, help="For one chunk.")
@click.option(
    "--weight-share",
    type=float,
    default=0.5,
    show_default=True,
    help="Fraction of the backward cost for gradients of weights, if the schedule splits the "
    "backward.",
)
@click.option("--png", metavar="FILE", help="Draw the schedule into FILE (.png or .svg).")
@click.option("--trace", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@AS_JSON
def command(
    *,
    kind: str | None,
    pipeline: int,
    virtual: int,
    microbatches: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw a pipeline schedule, and print its bubble and the peak number of activations in
    memory."""
    _require_drawable(pipeline, virtual, microbatches)
    schedule = build(kind or default_schedule(virtual), pipeline, virtual, microbatches)
    costs = Costs(
        options["forward_cost"], options["backward_cost"], weight_share=options["weight_share"]
    )
    title = f"{schedule.kind}: p={pipeline}, v={virtual}, m={microbatches}"
    timeline = replace(simulate(schedule, costs), title=title, time_unit="units of cost")
    if options["png"] is not None:
        draw.figure([timeline], options["png"])
    if options["trace"] is not None:
        chrome_trace(timeline, options["trace"])
    if as_json:
        click.echo(json.dumps(_numbers(schedule, timeline, costs)))
        return
    click.echo(_report(schedule, timeline, costs))
    for written in (options["png"], options["trace"]):
        if written is not None:
            click.echo(f"wrote {written}")


def _require_drawable(pipeline: int, virtual: int, microbatches: int) -> None:
    """Raise InputError if the schedule has too many ops to be listed and plotted."""
    forwards = pipeline * virtual * microbatches
    if forwards > MOST_FORWARDS:
        raise InputError(
            f"-p {pipeline} -v {virtual} -m {microbatches}: {forwards} forwards; at most "
            f"{MOST_FORWARDS} can be listed and drawn, so with these stages -m is at most "
            f"{MOST_FORWARDS // (pipeline * virtual)}"
        )


def _closed_form(schedule: Schedule, costs: Costs) -> float:
    """Return the bubble fraction that the closed formula of the schedule gives for ops with these
    costs."""
    return schedule.bubble_closed_form(costs.forward_s, costs.input_s, costs.weight_s)


def _numbers(schedule: Schedule, timeline: Timeline, costs: Costs) -> dict[str, object]:
    """Return the numbers of the schedule (such as bubble, makespan and peak activations) for
    --json."""
    return {
        "kind": schedule.kind,
        "pipeline": schedule.pipeline,
        "virtual": schedule.virtual,
        "microbatches": schedule.microbatches,
        "bubble_fraction": timeline.bubble_fraction(),
        "bubble_fraction_closed_form": _closed_form(schedule, costs),
        "makespan": timeline.makespan_s,
        "peak_activations": schedule.peak_activations(),
        "orders": [[str(op) for op in order] for order in schedule.orders],
    }


def _report(schedule: Schedule, timeline: Timeline, costs: Costs) -> str:
    """Return the drawing and the numbers as text that fits the width of the terminal."""
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    peaks = " ".join(map(str, schedule.peak_activations()))
    return "\n".join(
        [
            draw.terminal(timeline, width, color=color),
            "",
            f"bubble fraction   {timeline.bubble_fraction():.4f} (idle over ideal time)",
            f"  closed form     {_closed_form(schedule, costs):.4f} = {schedule.closed_form}",
            f"makespan          {timeline.makespan_s:g} {timeline.time_unit}",
            f"peak activations  {peaks} (forwards in flight, rank 0 first, in chunks)",
        ]
    )
