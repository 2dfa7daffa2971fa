"""The command line `ptdmpi`; the module of a subcommand is imported when that subcommand runs."""

import importlib

import click

from ptdmpi.terminal.program import CommandGroup, run

# name -> True if all ranks of a job work on it, False if rank 0 alone does
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
    """A group that imports `ptdmpi.commands.NAME` only when NAME runs: planning needs no torch."""

    in_parallel = frozenset(name for name, all_ranks in COMMANDS.items() if all_ranks)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return the subcommand `name`, or None for an unknown name."""
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
    """Train large language models over MPI: tensor, pipeline and data parallelism.

    The Tab key completes commands and options in bash after this line (in zsh and fish, with
    zsh_source and fish_source):

    eval "$(_PTDMPI_COMPLETE=bash_source ptdmpi)"
    """


def main() -> None:
    """Run the command line."""
    run(group, "ptdmpi", lists=True)
