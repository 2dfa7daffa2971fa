"""Common parts of all commands of both programs: options, exit codes, errors of one line.

A program is a `CommandGroup` of `Command`s; `run` runs its command line. Under mpirun or srun rank
0 alone prints help and errors of usage. A command that needs no MPI runs on rank 0 alone.
"""

import errno
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import click

from ptdmpi.base.errors import InputError
from ptdmpi.terminal.launched import launched_rank, launched_size
from ptdmpi.terminal.say import QUIET, note

EXIT_CODES = "Exit codes: 0 done, 1 failure, 2 bad input, 130 interrupted."
PACKAGES = ("ptdmpi", "data_prep")
# Errors of a path that the user can correct count as bad input. A full or broken disk is a failure.
MENDABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
}


def _print_and_exit(text_of: Callable[[click.Context], str]) -> Callable[..., None]:
    """Return a callback of an option that prints a text, on rank 0 alone, and exits."""

    def callback(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        """Print the text and exit, if the option is given."""
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
    """A command with the shared options; its help ends with its exit codes."""

    def __init__(self, name: str | None, *, exit_codes: str = EXIT_CODES, **options: Any) -> None:
        super().__init__(name, add_help_option=False, **{"epilog": exit_codes, **options})
        self.params.extend(_shared_options())


class CommandGroup(click.Group):
    """A group of commands with the shared options.

    Commands named in `in_parallel` run on all ranks of a job, the others on rank 0 alone.
    """

    command_class = Command
    group_class = type
    in_parallel: frozenset[str] | None = None  # None: the group above decides

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(name, add_help_option=False, **{"epilog": EXIT_CODES, **options})
        self.params.extend(_shared_options())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, but end the ranks that have no work for it, silently."""
        if self.in_parallel is not None and args[0] not in self.in_parallel:
            if launched_rank():
                ctx.exit()
            if launched_size() > 1 and args[0] in self.list_commands(ctx):
                note(
                    f"{ctx.command_path} {args[0]} works without MPI: rank 0 of "
                    f"{launched_size()} does it, the others have ended"
                )
        return super().resolve_command(ctx, args)


def run(
    program: click.Group, name: str, *, interrupted: str = "interrupted", lists: bool = False
) -> None:
    """Run the command line of the program `name`. An error is one line on stderr.

    `interrupted`: the message after Ctrl-C. `lists`: an InputError may have several lines, one for
    each mistake. Raises SystemExit: 2 for bad input, 130 if interrupted, 1 for other failures, or
    the command's own exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a file name may be any bytes
    try:
        code = program.main(prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        _end_all(error.format_message())
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else name
        _end_all(f"{name}: error: {_flat(error.format_message())} ({where} -h says what is legal)")
    except InputError as error:
        _end_all(f"{name}: error: {error if lists else _escaped(str(error))}")
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
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


def _flat(text: str) -> str:
    return " ".join(text.split())


def _end_all(text: str) -> NoReturn:
    """Exit with an error that every rank has found: rank 0 prints it.

    The other ranks exit with 0. At the first other exit code mpirun kills all ranks, and so would
    kill rank 0 before it has printed.
    """
    if launched_rank():
        sys.exit(0)
    _end(text, 2)


def _end(text: str, code: int) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    sys.exit(code)


def explained(error: BaseException) -> tuple[str, int] | None:
    """Return one line and an exit code for an error whose cause is outside the program.

    Such errors come from a missing package or MPI library, a path, a disk, or a child process that
    died. Return None for any other error.
    """
    if isinstance(error, ChildProcessError):
        return _escaped(str(error)), 1
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in PACKAGES:
            return None
        return missing(package), 2
    if isinstance(error, RuntimeError | ImportError) and _loads_mpi(error):
        return (
            "no MPI library can be loaded: load the site's MPI module (MPI4PY_LIBMPI may name the "
            "library), or pip install 'ptdmpi[mpi]'",
            2,
        )
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        text = _escaped(f"{where}{error.strerror or error}")
        if error.errno in MENDABLE and error.filename:
            return text, 2
        return text, 1
    return None


def _escaped(text: str) -> str:
    """Return the text as one line; a file name may contain line ends."""
    return "\\n".join(text.splitlines())


def _loads_mpi(error: Exception) -> bool:
    """Return True if mpi4py raised the error because it found no MPI library.

    Return False if a library was found but did not start because another rank was lost.
    """
    where = "mpi4py" if isinstance(error, ImportError) else "_mpiabi"
    frames = traceback.extract_tb(error.__traceback__)
    return "MPI" in str(error) and any(where in frame.filename for frame in frames)


def missing(package: str) -> str:
    """Return a message that says how to install a missing package.

    It names the smallest extra of this project that contains the package, or the package itself.
    """
    extras: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("ptdmpi") or []:
        named = re.match(r"[\w.-]+", line)
        extra = re.search(r'extra == [\'"](\w+)[\'"]', line)
        if named and extra and extra[1] != "test":
            extras.setdefault(extra[1], set()).add(named[0].lower())
    containing = [name for name, packages in extras.items() if package.lower() in packages]
    wanted = package
    if containing:
        smallest = min(containing, key=lambda name: len(extras[name]))
        wanted = f"'ptdmpi[{smallest}]'"
    return f"the package {package} is not installed: pip install {wanted}"


@contextmanager
def mendable_paths() -> Iterator[None]:
    """Raise InputError for an error of a path that the user can correct (missing, unreadable)."""
    try:
        yield
    except OSError as error:
        explanation = explained(error)
        if explanation is None or explanation[1] != 2:
            raise
        raise InputError(explanation[0]) from error
