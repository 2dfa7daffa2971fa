"""`ptdmpi generate`: continue texts with a trained model, on one rank or on all ranks of a job."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.base.outside import mendable_paths
from ptdmpi.base.say import note
from ptdmpi.comm import launch
from ptdmpi.config import InputError
from ptdmpi.terminal.options import PATH, SAMPLES, options_of_a_trained_model, options_of_sampling
from ptdmpi.terminal.program import Command

if TYPE_CHECKING:
    from ptdmpi.comm.world import World


@click.command(cls=Command)
@click.argument("run", type=PATH)
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be repeated.")
@click.option("--prompts", "from_file", type=PATH, help="File with one prompt per line, or .jsonl.")
@click.option(
    "--chat", is_flag=True, help="Answer each line of standard input, until the input ends."
)
@click.option(
    "--batch", type=click.IntRange(1), default=16, show_default=True, help="Prompts at a time."
)
@click.option(
    "--max-new-tokens", type=int, help="[default: 100, or fewer if the sequence length is reached]"
)
@click.option("--samples", type=SAMPLES, default=1, help="Continuations per prompt.")
@options_of_sampling(1.0)
@options_of_a_trained_model
def command(run: Path, chat: bool, as_json: bool, **options: Any) -> None:
    """Continue prompts with the newest checkpoint of RUN. RUN is a run directory, a checkpoint, or
    a directory that `ptdmpi convert from-hf` has written. The same seed gives the same text in
    every layout. An example:

    mpirun -n 4 ptdmpi generate runs/demo --prompt "import " --layout t=2,p=2

    With --prompts each continuation is a line of JSON, written as soon as it is complete.
    With --chat each answer takes the whole conversation into account, cut to the model's sequence
    length.
    """
    _require_one_way(chat, as_json, options)
    launch.begin("generate")
    # importing `World` initializes MPI, which must happen before torch starts its threads
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
    """Raise InputError if options contradict each other."""
    given = {"--prompt": options["prompts"], "--prompts": options["from_file"], "--chat": chat}
    ways = [name for name, value in given.items() if value]
    if len(ways) > 1:
        raise InputError(f"{' and '.join(ways)}: give one of them")
    if chat and as_json:
        raise InputError("--json cannot be combined with --chat; legal: --prompts FILE")
    if chat and options["samples"] > 1:
        raise InputError(f"--samples {options['samples']}: --chat gives one answer to each line")


def _talk(run: Path, world: "World", options: Mapping[str, Any]) -> None:
    """Answer each line of the standard input, until the input ends."""
    from ptdmpi.generate.chat import Chat, read_line
    from ptdmpi.generate.write import Writer

    writer = Writer(run, world, options)
    chat = Chat(writer)
    way = "the model answers each line in the format of its chat template"
    if chat.dialogue.template is None:
        way = "the answer to each line is a likely continuation of it (the model has no template)"
    note(f"{writer.stored.checkpoint}: {way}; Ctrl-D ends")
    why = chat.talk(read_line)
    note(f"\nptdmpi generate: the conversation ends: {why}")


def _print(samples: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print prompts with their continuations. Number the prompts if there are several."""
    if as_json:
        print(json.dumps({"samples": samples}))
        return
    for number, sample in enumerate(samples):
        if number > 0:
            print()
        if len(samples) > 1:
            print(f"-- {number + 1} of {len(samples)}")
        print(sample["prompt"] + sample["text"])
