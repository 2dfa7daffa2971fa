"""`ptdmpi generate`: what a trained model writes; on one rank, or started by mpirun or srun."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ptdmpi.comm import launch
from ptdmpi.terminal.program import Command, mendable_paths

SHARED = (
    click.option("--layout", metavar="t=2,p=2", help="Ranks of each model [default: the run's]."),
    click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32", "fp64"])),
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
@click.option("--max-new-tokens", type=int, help="[default: 100, or what the model has room for]")
@click.option("--samples", type=click.IntRange(1), default=1, help="Of each prompt.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, help="Draw among so many tokens only.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Or of this probability.")
@click.option("--seed", type=int, default=0, show_default=True)
@shared
def command(run: Path, **options: Any) -> None:
    """Continue prompts with the newest checkpoint of RUN: a run directory, a checkpoint, or what
    `ptdmpi convert from-hf` made. The same seed gives the same text in every layout, for example

    mpirun -n 4 ptdmpi generate runs/demo --prompt "import " --layout t=2,p=2
    """
    launch.begin("generate")
    # MPI is initialised by this import: before torch starts its threads
    from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.generate.write import write

        samples = write(run, world, **{k: v for k, v in options.items() if k != "as_json"})
        if world.rank:
            return
        if options["as_json"]:
            print(json.dumps({"samples": samples}))
            return
        for number, sample in enumerate(samples):
            if len(samples) > 1:
                print(f"{'' if number == 0 else chr(10)}-- {number + 1} of {len(samples)}")
            print(sample["prompt"] + sample["text"])
