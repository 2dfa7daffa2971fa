"""`ptdmpi evaluate`: score a trained model, on one rank or on all ranks of a job."""

import json
from pathlib import Path
from typing import Any

import click

from ptdmpi.base.outside import mendable_paths
from ptdmpi.comm import launch
from ptdmpi.terminal.options import PATH, SAMPLES, options_of_a_trained_model, options_of_sampling
from ptdmpi.terminal.program import Command


@click.command(cls=Command)
@click.argument("run", type=PATH)
@click.option("--data", multiple=True, type=PATH, help="Token shards, for perplexity.")
@click.option(
    "--stride", type=int, help="Tokens scored per window [default: all; windows do not overlap]."
)
@click.option(
    "--words", type=click.IntRange(1), help="Number of words in the text; adds perplexity per word."
)
@click.option(
    "--tasks", multiple=True, type=PATH, help="File of items with choices, answers or labels."
)
@click.option("--shots", type=click.IntRange(0), default=0, help="Solved examples before an item.")
@click.option("--shots-from", type=PATH, help="Take the examples from this .jsonl.")
@click.option("--separator", default=" ", help="Text before an answer [default: a space].")
@click.option(
    "--neutral",
    default="Answer:",
    show_default=True,
    help="Context for comparison: a choice is also scored after this text.",
)
@click.option(
    "--samples",
    type=SAMPLES,
    default=1,
    help="Answers per item (the majority is scored), or programs per task.",
)
@options_of_sampling(0.0)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Greatest length of an answer.",
)
@click.option("--until", multiple=True, default=["\n"], help="End of answers [default: newline].")
@click.option("--extract", help="Regular expression: its last match is the answer.")
@click.option(
    "--code", multiple=True, type=PATH, help="File of programming tasks with tests, for pass@k."
)
@click.option("--k", multiple=True, type=click.IntRange(1), default=[1], help="k of pass@k [1].")
@click.option(
    "--allow-network", is_flag=True, help="Run programs even if the network cannot be cut off."
)
@click.option("--lm-eval", multiple=True, help="Task of lm-evaluation-harness (extra 'eval').")
@click.option("--lm-eval-path", help="Directory of further tasks for --lm-eval.")
@options_of_a_trained_model
def command(run: Path, **options: Any) -> None:
    """Evaluate the newest checkpoint of RUN in any layout, for example

    mpirun -n 4 ptdmpi evaluate runs/demo --data runs/demo-data/valid --layout t=2,p=2

    RUN is a run directory, a checkpoint, or a directory that `ptdmpi convert from-hf` has written.
    """
    launch.begin("evaluate")
    # importing `World` initializes MPI, which must happen before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.evaluate.run import evaluate

        as_json = options.pop("as_json")
        result = evaluate(run, world, **options)
        if world.rank == 0:
            print(json.dumps(result) if as_json else _table(result))


def _table(result: dict[str, Any]) -> str:
    """Return the scores as text, with one block for each data set, each task file and each task of
    lm-evaluation-harness."""
    checkpoint = result["checkpoint"]
    lines = [f"{checkpoint}: step {result['step']}, {result['layout']}, {result['precision']}"]
    scored = [(scores["dataset"], scores) for scores in result["perplexity"]]
    scored += [(scores["file"], scores) for scores in result["tasks"]]
    scored += [(scores["file"], scores) for scores in result.get("code", [])]
    scored += list(result.get("lm_eval", {}).items())
    for title, scores in scored:
        lines += ["", title]
        for key, value in scores.items():
            if isinstance(value, dict):
                lines += [_class_line(name, accuracy) for name, accuracy in value.items()]
            elif key not in ("dataset", "file", "alias", "kind"):
                lines.append(f"  {key.replace('_', ' '):<28} {_shown(value):>16}")
    return "\n".join(lines)


def _class_line(name: str, scores: dict[str, Any]) -> str:
    """Return a line with the accuracy on the items of one class, or with "-" if no item has this
    class."""
    accuracy = "-" if scores["accuracy"] is None else f"{scores['accuracy']:.4f}"
    shown = f"{accuracy} of {scores['items']:,}"
    return f"  {f'accuracy of {name}':<28} {shown:>16}"


def _shown(value: object) -> str:
    """Return a score as text. Words are returned unchanged: lm-evaluation-harness returns N/A for a
    missing standard error."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
