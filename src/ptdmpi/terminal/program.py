"""What all commands of both programs have: -h, --version, --quiet, exit codes, errors of one line.

A program is a `CommandGroup` of `Command`s that `run` calls. Under mpirun or srun, what is said of
usage is said by rank 0 alone, and a command that needs no MPI is done by rank 0 alone.
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

from ptdmpi.config import InputError
from ptdmpi.terminal.launched import launched_rank, launched_size
from ptdmpi.terminal.say import QUIET, note

EXIT_CODES = "Exit codes: 0 done, 1 failure, 2 bad input, 130 interrupted."
PACKAGES = ("ptdmpi", "data_prep")
# Of a path that somebody gave: what its owner can mend. A full or broken disk is another matter.
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


def _told_once(text_of: Callable[[click.Context], str]) -> Callable[..., None]:
    """A callback that prints a text, on rank 0 alone, and ends."""

    def tell(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given and not context.resilient_parsing:
            if launched_rank() == 0:
                click.echo(text_of(context))
            context.exit()

    return tell


def _version(context: click.Context) -> str:
    return f"{context.find_root().info_name}, version {importlib.metadata.version('ptdmpi')}"


def _keep_quiet(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        context.meta[QUIET] = True


def _shared_options() -> list[click.Parameter]:
    flag = partial(click.Option, is_flag=True, expose_value=False)
    return [
        flag(["--quiet"], callback=_keep_quiet, help="Results and errors only, no progress."),
        flag(["--version"], callback=_told_once(_version), is_eager=True, help="Say the version."),
        flag(
            ["-h", "--help"],
            callback=_told_once(lambda context: context.get_help()),
            is_eager=True,
            help="Say this.",
        ),
    ]


class Command(click.Command):
    """A command with the shared options, and its exit codes at the end of its help."""

    def __init__(self, name: str | None, *, exit_codes: str = EXIT_CODES, **options: Any) -> None:
        super().__init__(name, add_help_option=False, **{"epilog": exit_codes, **options})
        self.params.extend(_shared_options())


class CommandGroup(click.Group):
    """Commands with the shared options; those named in `in_parallel` work on all ranks of a job,
    the others on rank 0 alone."""

    command_class = Command
    group_class = type
    in_parallel: frozenset[str] | None = None  # None: for the group above to say

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(name, add_help_option=False, **{"epilog": EXIT_CODES, **options})
        self.params.extend(_shared_options())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; ends ranks that a command has no work for, before they say anything."""
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
    """Run the command line of the program `name`; what goes wrong is one line on stderr, or where
    the program `lists` mistakes, one line for each.

    Raises SystemExit: 2 bad input, 130 interrupted, 1 others; or the command's own.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        code = program.main(prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        _end_all(error.format_message())
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else name
        _end_all(f"{name}: error: {_flat(error.format_message())} ({where} -h says what is legal)")
    except InputError as error:
        _end_all(f"{name}: error: {error if lists else _escaped(str(error))}")
    except BrokenPipeError:  # who read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        _end(f"{name}: {interrupted}", 130)
    except Exception as error:
        found = explained(error)
        if found is None:
            raise
        _end(f"{name}: error: {found[0]}", found[1])
    if code:
        sys.exit(code)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _end_all(text: str) -> NoReturn:
    """End with what every rank has found alike: rank 0 says it. The others end as if all were well,
    because mpirun kills all at the first other exit code, rank 0 before it has spoken, too."""
    if launched_rank():
        sys.exit(0)
    _end(text, 2)


def _end(text: str, code: int) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    sys.exit(code)


def explained(error: BaseException) -> tuple[str, int] | None:
    """One line and an exit code for what has its cause outside the program: a package or an MPI
    library that is not there, a path, a disk, a child that died. None for anything else."""
    if isinstance(error, ChildProcessError):
        return _escaped(str(error)), 1
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return None if package in PACKAGES else (missing(package), 2)
    if isinstance(error, RuntimeError | ImportError) and _loads_mpi(error):
        return (
            "no MPI library can be loaded: load the site's MPI module (MPI4PY_LIBMPI may name the "
            "library), or pip install 'ptdmpi[mpi]'",
            2,
        )
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        text = _escaped(f"{where}{error.strerror or error}")
        return text, 2 if error.errno in MENDABLE and error.filename else 1
    return None


def _escaped(text: str) -> str:
    """Names of files may have line ends in them."""
    return "\\n".join(text.splitlines())


def _loads_mpi(error: Exception) -> bool:
    """Whether an error comes from mpi4py as it looks for a library, and not from the library that
    it found, whose start fails where another rank was lost."""
    where = "mpi4py" if isinstance(error, ImportError) else "_mpiabi"
    frames = traceback.extract_tb(error.__traceback__)
    return "MPI" in str(error) and any(where in frame.filename for frame in frames)


def missing(package: str) -> str:
    """What to install where a package is not there: the smallest of our extras that brings it, or
    the package itself."""
    extras: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("ptdmpi") or []:
        named, extra = re.match(r"[\w.-]+", line), re.search(r'extra == [\'"](\w+)[\'"]', line)
        if named and extra and extra[1] != "test":
            extras.setdefault(extra[1], set()).add(named[0].lower())
    bring = [name for name, packages in extras.items() if package.lower() in packages]
    wanted = f"'ptdmpi[{min(bring, key=lambda name: len(extras[name]))}]'" if bring else package
    return f"the package {package} is not installed: pip install {wanted}"


@contextmanager
def mendable_paths() -> Iterator[None]:
    """Turn what is wrong with a path that was given (not there, not readable) into InputError."""
    try:
        yield
    except OSError as error:
        found = explained(error)
        if found is None or found[1] != 2:
            raise
        raise InputError(found[0]) from error
