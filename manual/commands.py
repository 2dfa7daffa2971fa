"""Generate the reference of the commands of `ptdmpi` and `ptdmpi-data` from click."""

import inspect
import re
from collections.abc import Iterator

import click

from data_prep.cli import commands as data_group
from ptdmpi.cli import group as trainer_group

PROGRAMS: dict[str, click.Group] = {"ptdmpi": trainer_group, "ptdmpi-data": data_group}
# Parameters that every command has; the page explains them once.
EVERYWHERE = ("help", "version", "quiet")
# Matches a paragraph of help that is a command to type.
EXAMPLE = re.compile(r"(mpirun|srun|ptdmpi(-data)?|eval) .*[^.,;:]$", re.DOTALL)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield each command that is not a group, with its full name, in the order of the help text."""
    for program, group in PROGRAMS.items():
        yield from _below(program, group)


def _below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, info_name=name)
    for sub in command.list_commands(context):
        below = command.get_command(context, sub)
        if below is not None:
            yield from _below(f"{name} {sub}", below)


def page() -> str:
    """Return the generated part of docs/reference/commands.md."""
    return "\n".join(_section(name, command) for name, command in commands())


def _section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## {name}\n", f"    {name} {usage}\n"]
    parts.append(_paragraphs(inspect.cleandoc(command.help or "")))
    rows = list(_rows(command, context))
    if rows:
        parts.append("| option | type | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(rows) + "\n")
    if command.epilog:
        parts.append(_paragraphs(inspect.cleandoc(command.epilog)))
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    """Return help text as Markdown. Paragraphs that are example commands become blocks of code."""
    paragraphs = [part.replace("\b\n", "").strip() for part in re.split(r"\n\s*\n", text)]
    return "\n\n".join(map(_paragraph, paragraphs)) + "\n"


def _paragraph(text: str) -> str:
    if EXAMPLE.match(text):
        return "\n".join(f"    {line}" for line in text.splitlines())
    return re.sub(r"([<>*_\[\]])", r"\\\1", text)


def _rows(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        if not isinstance(parameter, click.Option) or parameter.name in EVERYWHERE:
            continue
        if parameter.hidden:
            continue
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        meaning = " ".join((parameter.help or "").split())
        cells = (names, _type(parameter, context), _default(parameter), _cell(meaning))
        yield "| " + " | ".join(cells) + " |"


def _type(option: click.Option, context: click.Context) -> str:
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.Choice):
        return ", ".join(f"`{choice}`" for choice in option.type.choices)
    name = option.make_metavar(context).strip("[]")
    return f"`{name}`" + (", repeatable" if option.multiple else "")


def _default(option: click.Option) -> str:
    value = option.default
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"`{value}`" if plain and value != "" else ""


def _cell(text: str) -> str:
    return re.sub(r"([<>*_|\[\]])", r"\\\1", text)
