"""`ptdmpi schedule`: draws a pipeline schedule and counts its bubble and its activations."""

import json
import os
import shutil
import sys
from dataclasses import replace
from typing import Any

import click

from ptdmpi.config import InputError
from ptdmpi.config.layout import MOST_FORWARDS, default_schedule
from ptdmpi.plan.schedule.orders import KINDS, Schedule, build
from ptdmpi.plan.schedule.simulate import Costs, Timeline, simulate
from ptdmpi.plan.show import draw
from ptdmpi.terminal.program import Command


@click.command("schedule", cls=Command)
@click.option("--kind", help=f"{', '.join(KINDS)}; default: 1f1b at v=1, else interleaved.")
@click.option("-p", "--pipeline", type=int, required=True, help="Pipeline ranks.")
@click.option("-v", "--virtual", type=int, default=1, show_default=True, help="Chunks per rank.")
@click.option("-m", "--microbatches", type=int, required=True, help="Microbatches per step.")
@click.option("--forward-cost", type=float, default=1.0, show_default=True, help="Per chunk.")
@click.option("--backward-cost", type=float, default=2.0, show_default=True, help="Per chunk.")
@click.option("--png", metavar="FILE", help="Draw into FILE (.png or .svg).")
@click.option("--trace", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    kind: str | None,
    pipeline: int,
    virtual: int,
    microbatches: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw a pipeline schedule, with its bubble and its activations in flight."""
    forwards = pipeline * virtual * microbatches
    if forwards > MOST_FORWARDS:
        raise InputError(
            f"-p {pipeline} -v {virtual} -m {microbatches}: {forwards} forwards; at most "
            f"{MOST_FORWARDS} are listed and drawn, so with these stages -m is at most "
            f"{MOST_FORWARDS // (pipeline * virtual)}"
        )
    schedule = build(kind or default_schedule(virtual), pipeline, virtual, microbatches)
    costs = Costs(options["forward_cost"], options["backward_cost"])
    title = f"{schedule.kind}: p={pipeline}, v={virtual}, m={microbatches}"
    timeline = replace(simulate(schedule, costs), title=title, time_unit="units of cost")
    if options["png"] is not None:
        draw.figure([timeline], options["png"])
    if options["trace"] is not None:
        draw.chrome_trace(timeline, options["trace"])
    if as_json:
        click.echo(json.dumps(_numbers(schedule, timeline)))
        return
    click.echo(_report(schedule, timeline))
    for written in (options["png"], options["trace"]):
        if written is not None:
            click.echo(f"wrote {written}")


def _numbers(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    return {
        "kind": schedule.kind,
        "pipeline": schedule.pipeline,
        "virtual": schedule.virtual,
        "microbatches": schedule.microbatches,
        "bubble_fraction": timeline.bubble_fraction(),
        "bubble_fraction_closed_form": schedule.bubble_fraction_closed_form,
        "makespan": timeline.makespan_s,
        "peak_activations": schedule.peak_activations(),
        "orders": [[str(op) for op in order] for order in schedule.orders],
    }


def _report(schedule: Schedule, timeline: Timeline) -> str:
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    peaks = " ".join(map(str, schedule.peak_activations()))
    return "\n".join(
        [
            draw.terminal(timeline, width, color=color),
            "",
            f"bubble fraction   {timeline.bubble_fraction():.4f} (idle over ideal time)",
            f"  closed form     {schedule.bubble_fraction_closed_form:.4f} = (p - 1) / (v m)",
            f"makespan          {timeline.makespan_s:g} {timeline.time_unit}",
            f"peak activations  {peaks} (forwards in flight, rank 0 first, in chunks)",
        ]
    )
