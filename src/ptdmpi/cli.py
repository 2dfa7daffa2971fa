"""The command `ptdmpi`: parse, call, print. Each subcommand is imported when it is asked for."""

import importlib

import click

from ptdmpi.terminal.program import CommandGroup, run

# name -> whether all ranks of a job work on it
COMMANDS = {
    "init": False,
    "train": True,
    "plan": False,
    "ask": False,
    "probe": True,
    "schedule": False,
    "watch": False,
    "report": False,
    "doctor": True,
    "checkpoint": False,
    "convert": False,
    "adapter": False,
    "quantize": True,
    "generate": True,
    "evaluate": True,
}


class LazyGroup(CommandGroup):
    """Imports `ptdmpi.commands.NAME` only when NAME runs, so that planning needs no torch."""

    in_parallel = frozenset(name for name, all_ranks in COMMANDS.items() if all_ranks)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ptdmpi.commands.{name}").command
        return command


@click.group(
    cls=LazyGroup,
    epilog="Exit codes: 0 done, 2 bad input, 75 stopped on request after "
    "saving, 130 interrupted, else a failure.",
)
def group() -> None:
    """Trains large language models over MPI: tensor, pipeline and data parallelism.

    Completion of commands and options by the Tab key, in bash (zsh, fish: their names):

    eval "$(_PTDMPI_COMPLETE=bash_source ptdmpi)"
    """


def main() -> None:
    """Run the command line."""
    run(group, "ptdmpi", lists=True)
