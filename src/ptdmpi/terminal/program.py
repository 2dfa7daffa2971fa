"""Code that all commands of the programs `ptdmpi` and `ptdmpi-data` share: options, exit codes, and
one-line error messages.

Each program is a `CommandGroup` of `Command` objects, and the function `run` executes the program's
command line. Under mpirun or srun only rank 0 prints help and usage errors. A command that needs no
MPI runs only on rank 0.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from ptdmpi.base import early
from ptdmpi.base.errors import InputError
from ptdmpi.base.launched import launched_rank, launched_size
from ptdmpi.base.outside import escaped, explained
from ptdmpi.base.say import QUIET, note
from ptdmpi.base.words import printable

EXIT_CODES = "Exit codes: 0 done, 1 failure, 2 bad input, 130 interrupted."


def _print_and_exit(text_of: Callable[[click.Context], str]) -> Callable[..., None]:
    """Return the callback for an option such as --help. The callback prints a text on rank 0, and
    exits on all ranks. `text_of` is a function that returns the text to print."""

    def callback(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        """Print the result of `text_of` and exit, if the option is on the command line
        (`given`)."""
        if given and not context.resilient_parsing:
            if launched_rank() == 0:
                click.echo(text_of(context))
            context.exit()

    return callback


def _version(context: click.Context) -> str:
    return f"{context.find_root().info_name}, version {importlib.metadata.version('ptdmpi')}"


def _keep_quiet(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        context.meta[QUIET] = True


def _shared_options() -> list[click.Parameter]:
    flag = partial(click.Option, is_flag=True, expose_value=False)
    return [
        flag(["--quiet"], callback=_keep_quiet, help="Print results and errors only, no progress."),
        flag(
            ["--version"],
            callback=_print_and_exit(_version),
            is_eager=True,
            help="Print the version.",
        ),
        flag(
            ["-h", "--help"],
            callback=_print_and_exit(lambda context: context.get_help()),
            is_eager=True,
            help="Print this help.",
        ),
    ]


class Command(click.Command):
    """A command with the options that all commands share, such as --help. Its help text ends with
    the list of its exit codes."""

    def __init__(self, name: str | None, *, exit_codes: str = EXIT_CODES, **options: Any) -> None:
        super().__init__(name, add_help_option=False, **{"epilog": exit_codes, **options})
        self.params.extend(_shared_options())


class CommandGroup(click.Group):
    """A group of commands. The group itself also has the options that all commands share.

    Commands whose names are in `in_parallel` run on all ranks of a job. All other commands run only
    on rank 0.
    """

    command_class = Command
    group_class = type
    in_parallel: frozenset[str] | None = None  # None: the parent group determines the value

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(name, add_help_option=False, **{"epilog": EXIT_CODES, **options})
        self.params.extend(_shared_options())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name, as click does. If the command runs only on rank 0, end all
        other ranks without a message."""
        if self.in_parallel is not None and args[0] not in self.in_parallel:
            if launched_rank():
                ctx.exit()
            if launched_size() > 1 and args[0] in self.list_commands(ctx):
                note(
                    f"{ctx.command_path} {args[0]} works without MPI: only rank 0 of "
                    f"{launched_size()} ranks runs it, and the others have ended"
                )
        return super().resolve_command(ctx, args)


def run(
    program: click.Group, name: str, *, interrupted: str = "interrupted", lists: bool = False
) -> None:
    """Execute the command line of the program `name`. An error is printed as one line on stderr.

    `interrupted` is the message that is printed after Ctrl-C. If `lists` is True, the message of an
    InputError may have several lines, one for each mistake. Raises SystemExit with code 2 for bad
    input, 130 after Ctrl-C, 1 for other failures, or with the command's own exit code.
    """
    early.imported()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a file name may contain bytes that are not valid text
            stream.reconfigure(errors="backslashreplace")
    try:
        code = program.main(prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        _end_all(error.format_message())
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else name
        _end_all(f"{name}: error: {_flat(error.format_message())} ({where} -h says what is legal)")
    except InputError as error:
        _end_all(f"{name}: error: {error if lists else escaped(str(error))}")
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        _end(f"{name}: {interrupted}", 130)
    except Exception as error:
        explanation = explained(error)
        if explanation is None:
            raise
        text, exit_code = explanation
        _end(f"{name}: error: {text}", exit_code)
    if code:
        sys.exit(code)


def require_own_package() -> None:
    """Raise InputError if another folder with the name `ptdmpi`, for example in the current
    directory, hides this package. Python would then look for the modules of this package in that
    folder.
    """
    folder = Path(__file__).parents[1]
    package = sys.modules["ptdmpi"].__file__
    if package is not None and Path(package).parent != folder:
        raise InputError(
            f"the folder {Path(package).parent} shadows the package ptdmpi in {folder}: rename "
            "that folder, or start in another directory"
        )


def _flat(text: str) -> str:
    return " ".join(text.split())


def _end_all(text: str) -> NoReturn:
    """Exit after an error that all ranks have raised. Only rank 0 prints the error.

    All other ranks exit with code 0. When a rank exits with a non-zero code, mpirun kills all other
    ranks. If another rank exited with such a code, mpirun could kill rank 0 before rank 0 has
    printed the error.
    """
    if launched_rank():
        sys.exit(0)
    _end(text, 2)


def _end(text: str, code: int) -> NoReturn:
    print(printable(text), file=sys.stderr, flush=True)
    sys.exit(code)
