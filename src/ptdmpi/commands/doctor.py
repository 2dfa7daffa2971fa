"""`ptdmpi doctor`: check the machine, or the exactness of training on it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.base.say import note
from ptdmpi.comm import launch
from ptdmpi.config import InputError
from ptdmpi.terminal.options import AS_JSON, PATH, NamedPath
from ptdmpi.terminal.program import Command

if TYPE_CHECKING:
    from ptdmpi.comm.world import World
    from ptdmpi.parity import layouts, suite


@click.command("doctor", cls=Command)
@click.argument("config", type=PATH, required=False)
@click.option("--parity", is_flag=True, help="Train small models in every layout and compare.")
@click.option("--wire", default="auto", help="With --parity: tensor transport, as in comm.wire.")
@click.option("--short", is_flag=True, help="With --parity: a few layouts and steps only.")
@click.option(
    "--rows",
    metavar="TEXT",
    help='With --parity: rows with TEXT in section, "t p v d b z", schedule, options or model.',
)
@click.option(
    "--report",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Write the findings and all versions to a file that can be attached to an issue.",
)
@click.option(
    "--coordinates",
    metavar="CONFIG",
    type=PATH,
    help="Train models of several widths, and check that activations do not grow with muP.",
)
@click.option("--picture", type=PATH, help="With --coordinates: draw the activations by width.")
@AS_JSON
def command(
    *, parity: bool, coordinates: Path | None, report: Path | None, as_json: bool, **others: Any
) -> None:
    """Check the machine, on all ranks of the job. With --parity, check that training on this
    machine is exact. With --parity CONFIG, check that training is exact with your own sublayers, in
    a small model. With --coordinates, check that activations do not grow with the width of the
    model (muP).

    mpirun -n 8 ptdmpi doctor --parity

    mpirun -n 8 ptdmpi doctor --parity config.toml

    ptdmpi doctor --coordinates config.toml --picture widths.png

    The exit code is 1 if a finding is bad, if a row of the parity table is red, or if activations
    grow.
    """
    _require_together(parity, coordinates, report, others)
    launch.begin("doctor")
    # importing `World` initializes MPI, which must happen before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        if parity:
            only = others["rows"] or ""
            asked = {name: others[name] for name in ("short", "wire", "config")} | {"only": only}
            good = check_parity(world, as_json=as_json, **asked)
        elif coordinates is not None:
            good = check_coordinates(world, coordinates, others["picture"], as_json=as_json)
        else:
            good = check_machine(world, report=report, as_json=as_json)
        if not good:
            raise SystemExit(1)


def _require_together(
    parity: bool, coordinates: Path | None, report: Path | None, others: Mapping[str, Any]
) -> None:
    """Raise UsageError if options cannot be combined."""
    if parity and coordinates is not None:
        raise click.UsageError(
            "--parity and --coordinates are different checks; give only one of them"
        )
    if report is not None and (parity or coordinates is not None):
        raise click.UsageError("--report belongs to the check of the machine")
    for name, usual in (("short", False), ("rows", None), ("wire", "auto"), ("config", None)):
        if others[name] != usual and not parity:
            shown = "CONFIG" if name == "config" else f"--{name}"
            raise click.UsageError(f"{shown} belongs to --parity")
    if others["picture"] is not None and coordinates is None:
        raise click.UsageError("--picture belongs to --coordinates")


def check_coordinates(world: "World", config: Path, picture: Path | None, *, as_json: bool) -> bool:
    """Train models of several widths, based on the configuration file `config`, and print how their
    activations grow with the width. This check needs a job with one rank. If `picture` is given,
    draw the activations into this file. Return True if the activations do not grow with muP. Raise
    InputError for bad input, and in a job with several ranks.
    """
    from ptdmpi.config import load
    from ptdmpi.plan.show.draw import check_picture
    from ptdmpi.probe import coordinates

    if world.size > 1:
        raise InputError("--coordinates runs on one rank; start it without mpirun")
    if picture is not None:
        check_picture(picture)
    measured = coordinates.check(load(config), world)
    if as_json:
        click.echo(json.dumps(measured.as_json()))
    else:
        click.echo(measured.text())
        verdict = "do not grow" if measured.are_right else "grow"
        click.echo(f"with muP, activations {verdict} with the width")
    if picture is not None:
        coordinates.draw(measured, picture)
        note(f"wrote {picture}")
    return measured.are_right


def check_parity(
    world: "World",
    *,
    short: bool,
    as_json: bool,
    wire: str = "auto",
    only: str = "",
    config: Path | None = None,
) -> bool:
    """Train small models in many layouts, and print how exactly their results agree.

    All ranks must call this function. `wire` is a value of the key comm.wire. Only rows of the
    parity table whose names contain `only` are compared. If a configuration file `config` is given,
    the model of all rows has the user's sublayers that the file names. A row that compares results
    is red if a result differs by more than is allowed. In the other rows, a single token of the
    input is perturbed, and some of the losses must change. Such a row is red if other losses
    change, or if some of these losses do not change. Return True on every rank if no row is red.
    Raise SharedInputError if no row has `only` in its name, or if `config` has mistakes.
    """
    from ptdmpi.comm.wires import wire_named
    from ptdmpi.parity import layouts, probe, suite, table

    ranks = min(world.size, layouts.MOST_RANKS)
    chosen = wire_named(wire)
    exact = chosen.kind.exact

    def chosen_rows() -> "tuple[list[suite.Comparison], list[layouts.Case]]":
        """Return the rows of the parity table whose names contain `only`: comparisons of results,
        and probes (tests that perturb single tokens)."""
        if config is None:
            every = suite.comparisons(ranks, short=short, exact=exact)
            tokens = probe.cases(ranks, short=short)
        else:
            every, tokens = _own_rows(config, ranks, short=short)
        return _named(every, tokens, only)

    wanted, probes = world.on_root(chosen_rows)
    steps, say = suite.SHORT_STEPS if short else suite.STEPS, partial(click.echo, err=True)
    rows = suite.run(world, wanted, steps, say=say, wire=chosen)
    probed = probe.run(world, probes, wire=chosen, say=say)
    if world.rank == 0:
        if as_json:
            click.echo(json.dumps(table.as_json(rows, ranks, steps, probed=probed)))
        else:
            click.echo(table.text(rows, ranks, steps, probed=probed))
            if ranks < layouts.MOST_RANKS:
                click.echo(f"Layouts of {ranks + 1} to {layouts.MOST_RANKS} ranks were left out.")
    red = [row for row in rows if row.red()] + [probe for probe in probed if probe.faults]
    return world.on_root(lambda: not red)


def _own_rows(
    config: Path, ranks: int, *, short: bool
) -> "tuple[list[suite.Comparison], list[layouts.Case]]":
    """Return the comparisons and the probes (see `_named`) of a small model that has the user's
    sublayers from the configuration file `config`. Print the layouts in which this model cannot be
    trained. Raise InputError if the file has mistakes."""
    from ptdmpi.config import load
    from ptdmpi.parity import own

    rows = own.rows(own.model_of(load(config)), ranks, short=short)
    for line in rows.left_out:
        click.echo(f"parity: left out {line}", err=True)
    return rows.comparisons, rows.probes


def _named(
    every: "Sequence[suite.Comparison]", tokens: "Sequence[layouts.Case]", only: str
) -> "tuple[list[suite.Comparison], list[layouts.Case]]":
    """Return the comparisons of `every` and the probes of `tokens` whose names contain `only`. Each
    of them is one row of the parity table. A comparison trains a model in several layouts and
    compares the results. A probe perturbs single tokens in one layout. Raise InputError if no name
    contains `only`."""
    from ptdmpi.parity import table

    named = [row for row in every if only.lower() in table.named(row).lower()]
    probes = [case for case in tokens if only.lower() in table.probe_named(case).lower()]
    if not named and not probes:
        example, count = table.named(every[0]), len(every) + len(tokens)
        raise InputError(
            f"--rows {only}: none of the {count} rows contains it; a row is, for example, "
            f'"{example}"'
        )
    return named, probes


def check_machine(world: "World", *, as_json: bool, report: Path | None = None) -> bool:
    """Print the findings about the machine, including whether sums over the ranks are correct. All
    ranks must call this function. If `report` is given, the findings are also written to this file.
    Return True on every rank if no finding is bad.
    """
    from ptdmpi.probe.host_check import check_host
    from ptdmpi.probe.issue_report import report_text, save_report
    from ptdmpi.probe.sum_check import check_sums

    findings = [*check_host(world), *check_sums(world)]
    lines = [finding.line() for finding in findings]
    if world.rank == 0:
        if as_json:
            click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        else:
            click.echo("\n".join(lines))
    if report is not None:
        text = report_text(lines, os.environ)
        world.on_root(partial(save_report, report, text))
        note(f"wrote {report}")
    return world.on_root(lambda: all(finding.status != "bad" for finding in findings))
