"""The command line `ptdmpi`. The module of a subcommand is imported only when that subcommand
runs."""

import atexit
import importlib
import signal
from typing import NamedTuple

import click

from ptdmpi.terminal.program import CommandGroup, require_own_package, run


class CommandLine(NamedTuple):
    """The line that describes a command in the list of commands. The list can be printed without an
    import of the commands.

    `all_ranks` is True if all ranks of a job run the command, and False if only rank 0 runs it.
    """

    line: str
    all_ranks: bool = False


COMMANDS = {
    "init": CommandLine("Write a commented configuration that trains."),
    "run": CommandLine("Start a training run with its launcher, and restart lost ranks."),
    "submit": CommandLine("Print or submit the job script of a training run."),
    "train": CommandLine("Train a model; start it by mpirun or srun.", all_ranks=True),
    "plan": CommandLine("Predict layouts of a model on a cluster: time, memory, cost."),
    "ask": CommandLine("Answer questions about cost, time and network."),
    "cluster": CommandLine("Write a cluster file to edit."),
    "probe": CommandLine("Measure the machine; start it by mpirun or srun.", all_ranks=True),
    "schedule": CommandLine("Draw a pipeline schedule, and print its bubble and memory."),
    "watch": CommandLine("Show the progress of runs in the terminal."),
    "report": CommandLine("Report on a run (table, plots, page, trace), or compare several."),
    "doctor": CommandLine("Check the machine, or the exactness of training on it.", all_ranks=True),
    "checkpoint": CommandLine("Inspect, verify, compare or prune checkpoints."),
    "convert": CommandLine("Convert models from or to Hugging Face; make mixtures of experts."),
    "adapter": CommandLine("Merge, split, export or import adapters."),
    "quantize": CommandLine("Quantize weights to 8 or 4 bits.", all_ranks=True),
    "generate": CommandLine("Continue prompts with a trained model.", all_ranks=True),
    "evaluate": CommandLine("Measure perplexity, accuracy or pass@k of a model.", all_ranks=True),
}


BAD_INPUT = 2
END_S = 60.0


class LazyGroup(CommandGroup):
    """The group of all commands. The module of a command, `ptdmpi.commands.NAME`, is imported only
    when that command runs. The command `ptdmpi plan` therefore needs no torch."""

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
        """Write the list of commands into the help text. The descriptions come from `COMMANDS`, so
        that no command is imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.line) for name, entry in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    epilog="Exit codes: 0 done, 2 bad input, 75 stopped on request after "
    "saving, 130 interrupted, else a failure.",
)
def group() -> None:
    """Train large language models over MPI: tensor, pipeline and data parallelism.

    The following line makes the Tab key complete commands and options in bash (for zsh or fish,
    write zsh_source or fish_source instead of bash_source):

    eval "$(_PTDMPI_COMPLETE=bash_source ptdmpi)"
    """


def main() -> None:
    """Run the command line.

    After an error in the user's input, this process only has to exit. But MPI_Finalize, which runs
    at the exit, waits for the other ranks and the launcher. If MPI_Finalize takes longer than END_S
    seconds, SIGALRM ends this process.
    """
    try:
        run(group, "ptdmpi", lists=True)
    except SystemExit as end:
        if end.code == BAD_INPUT:
            atexit.register(_end_in_time)
        raise


def _end_in_time() -> None:
    """Set an alarm (SIGALRM), so that the operating system ends this process after END_S seconds.

    Python calls this function at the exit of the process, before mpi4py calls MPI_Finalize. Only
    the operating system can interrupt MPI_Finalize, so a Python timer would not help. The alarm is
    set only at the exit, because a program may call `main` and continue after the error, and an
    earlier alarm would kill this program.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, END_S)
