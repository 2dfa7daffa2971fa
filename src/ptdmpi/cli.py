"""The command line `ptdmpi`; the module of a subcommand is imported when that subcommand runs."""

import atexit
import importlib
import signal
from typing import NamedTuple

import click

from ptdmpi.terminal.program import CommandGroup, require_own_package, run


class CommandLine(NamedTuple):
    """The line of a command in the list of commands, which is printed without importing it.

    `all_ranks`: all ranks of a job work on the command; otherwise only rank 0 does.
    """

    line: str
    all_ranks: bool = False


COMMANDS = {
    "init": CommandLine("Write a commented configuration that trains."),
    "run": CommandLine("Start a training with its launcher, and keep it going."),
    "submit": CommandLine("Print or submit the job script of a training."),
    "train": CommandLine("Train a model; start it by mpirun or srun.", all_ranks=True),
    "plan": CommandLine("Predict layouts of a model on a cluster: time, memory, cost."),
    "ask": CommandLine("Answer questions of cost, time and network."),
    "cluster": CommandLine("Write a cluster file to edit."),
    "probe": CommandLine("Measure the machine; start it by mpirun or srun.", all_ranks=True),
    "schedule": CommandLine("Draw a pipeline schedule, and print its bubble and memory."),
    "watch": CommandLine("Show the progress of runs, drawn in place."),
    "report": CommandLine("Table, plots, page and trace of a run, or several compared."),
    "doctor": CommandLine("Check the machine, or the exactness of training on it.", all_ranks=True),
    "checkpoint": CommandLine("Inspect, verify, compare or prune checkpoints."),
    "convert": CommandLine("Convert from and to models of Hugging Face."),
    "adapter": CommandLine("Merge, split, export or import adapters."),
    "quantize": CommandLine("Weights in 8 or 4 bits, with or without calibration.", all_ranks=True),
    "generate": CommandLine("Continue prompts with a trained model.", all_ranks=True),
    "evaluate": CommandLine("Perplexity, choices, answers, accuracy, pass@k.", all_ranks=True),
}


BAD_INPUT = 2
END_S = 60.0


class LazyGroup(CommandGroup):
    """A group that imports `ptdmpi.commands.NAME` only when NAME runs: planning needs no torch."""

    in_parallel = frozenset(name for name, entry in COMMANDS.items() if entry.all_ranks)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return the subcommand `name`, or None for an unknown name."""
        if name not in COMMANDS:
            return None
        require_own_package()
        command: click.Command = importlib.import_module(f"ptdmpi.commands.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands by their lines in `COMMANDS`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.line) for name, entry in COMMANDS.items()])


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
    """Run the command line.

    After bad input nothing is left to do, but MPI_Finalize waits for the other ranks and the
    launcher. If they do not answer within END_S seconds, SIGALRM ends this process.
    """
    try:
        run(group, "ptdmpi", lists=True)
    except SystemExit as end:
        if end.code == BAD_INPUT:
            atexit.register(_end_in_time)
        raise


def _end_in_time() -> None:
    """Have the system end this process in END_S seconds, if it has not ended by then.

    It is called when Python ends, since a program may call `main` and go on. mpi4py finalizes MPI
    after that: nothing but the system can interrupt it.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, END_S)
