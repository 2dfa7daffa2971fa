"""The command `ptdmpi`: parse, call, print. Each subcommand is imported when it is asked for."""

import importlib
import sys

import click

from ptdmpi.config import InputError

COMMANDS = (
    "init",
    "train",
    "plan",
    "probe",
    "schedule",
    "watch",
    "report",
    "doctor",
    "checkpoint",
    "convert",
    "generate",
    "evaluate",
)


class LazyGroup(click.Group):
    """Imports `ptdmpi.commands.NAME` only when NAME runs, so that planning needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"ptdmpi.commands.{name}").command


@click.group(cls=LazyGroup)
@click.version_option(package_name="ptdmpi")
def group() -> None:
    """Trains large language models over MPI: tensor, pipeline and data parallelism.

    Exit codes: 0 done, 2 bad input, 75 stopped on request after saving, else a failure.
    """


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        group(prog_name="ptdmpi")
    except InputError as error:
        print(f"ptdmpi: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
