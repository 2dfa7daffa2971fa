"""`ptdmpi generate`: what a trained model writes; on one rank, or started by mpirun or srun."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.comm import launch
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.terminal.program import Command, mendable_paths
from ptdmpi.terminal.say import note

if TYPE_CHECKING:
    from ptdmpi.comm.world import World

FILE = click.Path(path_type=Path)

EMA = click.option("--ema", is_flag=True, help="The weights' average (optimizer.ema_decay).")
SHARED = (
    click.option("--adapter", type=FILE, help="Adapters over RUN: their run or checkpoint."),
    click.option("--layout", metavar="t=2,p=2", help="Ranks of each model [default: the run's]."),
    click.option("--precision", type=click.Choice(list(PRECISIONS))),
    EMA,
    click.option("--tokenizer", help="'bytes' or a tokenizer.json [default: the shards']."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs."),
)


def shared(function: Callable[..., None]) -> Callable[..., None]:
    """The options of all commands that ask a model."""
    for option in reversed(SHARED):
        function = option(function)
    return function


@click.command(cls=Command, short_help="Continue prompts with a trained model.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be given again.")
@click.option("--prompts", "from_file", type=FILE, help="File: a prompt a line, or .jsonl.")
@click.option("--chat", is_flag=True, help="Read lines, answer each, until the end of input.")
@click.option(
    "--batch", type=click.IntRange(1), default=16, show_default=True, help="Prompts together."
)
@click.option("--max-new-tokens", type=int, help="[default: 100, or what the model has room for]")
@click.option("--samples", type=click.IntRange(1), default=1, help="Of each prompt.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, help="Draw among so many tokens only.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Or of this probability.")
@click.option("--seed", type=int, default=0, show_default=True)
@shared
def command(run: Path, chat: bool, as_json: bool, **options: Any) -> None:
    """Continue prompts with the newest checkpoint of RUN: a run directory, a checkpoint, or what
    `ptdmpi convert from-hf` made. The same seed gives the same text in every layout, for example

    mpirun -n 4 ptdmpi generate runs/demo --prompt "import " --layout t=2,p=2

    With --prompts each continuation is a line of JSON, written as soon as it is there. With --chat
    each line is answered behind all that was said before, as far as the model sees.
    """
    _require_one_way(chat, as_json, options)
    launch.begin("generate")
    # MPI is initialised by this import: before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.generate.write import write, write_file

        if chat:
            _talk(run, world, options)
        elif options["from_file"] is not None:
            for line in write_file(run, world, **options):
                print(line, flush=True)
        else:
            samples = write(run, world, **options)
            if world.rank == 0:
                _print(samples, as_json)


def _require_one_way(chat: bool, as_json: bool, options: Mapping[str, Any]) -> None:
    """Raises InputError where options are given that do not go together."""
    given = {"--prompt": options["prompts"], "--prompts": options["from_file"], "--chat": chat}
    ways = [name for name, value in given.items() if value]
    if len(ways) > 1:
        raise InputError(f"{' and '.join(ways)}: legal is one of them")
    if chat and as_json:
        raise InputError("--json is not for a --chat; legal: --prompts FILE")
    if chat and options["samples"] > 1:
        raise InputError(f"--samples {options['samples']}: a --chat has one answer to each line")


def _talk(run: Path, world: "World", options: Mapping[str, Any]) -> None:
    from ptdmpi.generate.chat import Chat, read_line
    from ptdmpi.generate.write import Writer

    writer = Writer(run, world, options)
    note(
        f"{writer.stored.checkpoint}: a line is answered by what is likely to follow it; "
        "Ctrl-D ends"
    )
    why = Chat(writer).talk(read_line)
    note(f"\nptdmpi generate: the conversation ends: {why}")


def _print(samples: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"samples": samples}))
        return
    for number, sample in enumerate(samples):
        if len(samples) > 1:
            print(f"{'' if number == 0 else chr(10)}-- {number + 1} of {len(samples)}")
        print(sample["prompt"] + sample["text"])
