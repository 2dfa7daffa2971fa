"""`ptdmpi evaluate`: how good a trained model is; on one rank, or started by mpirun or srun."""

import json
from pathlib import Path
from typing import Any

import click

from ptdmpi.comm import launch
from ptdmpi.commands.generate import shared
from ptdmpi.terminal.program import Command, mendable_paths

PATH = click.Path(path_type=Path)


@click.command(cls=Command, short_help="Perplexity, choices, answers, accuracy, pass@k.")
@click.argument("run", type=PATH)
@click.option("--data", multiple=True, type=PATH, help="Directory of token shards: perplexity.")
@click.option("--stride", type=int, help="Tokens scored per window [default: all, no overlap].")
@click.option("--words", type=click.IntRange(1), help="Of the original text: adjusted perplexity.")
@click.option("--tasks", multiple=True, type=PATH, help=".jsonl of choices, answers, labels.")
@click.option("--shots", type=click.IntRange(0), default=0, help="Solved examples before each.")
@click.option("--shots-from", type=PATH, help="Where they come from: another .jsonl.")
@click.option("--separator", default=" ", help="Between context and answer [default: a space].")
@click.option("--neutral", default="Answer:", show_default=True, help="Context to compare with.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=1,
    help="Answers of which the majority counts, or programs.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--until", multiple=True, default=["\n"], help="Ends an answer [default: newline].")
@click.option("--extract", help="Regular expression: its last match is the answer.")
@click.option("--code", multiple=True, type=PATH, help=".jsonl of programs with tests: pass@k.")
@click.option("--k", multiple=True, type=click.IntRange(1), default=[1], help="Of pass@k [1].")
@click.option("--allow-network", is_flag=True, help="Run programs where it cannot be cut off.")
@click.option("--lm-eval", multiple=True, help="Task of lm-evaluation-harness (extra 'eval').")
@click.option("--lm-eval-path", help="Directory with task files of your own for it.")
@shared
def command(run: Path, **options: Any) -> None:
    """Evaluate the newest checkpoint of RUN: a run directory, a checkpoint, or what `ptdmpi convert
    from-hf` made; in any layout, for example

    mpirun -n 4 ptdmpi evaluate runs/demo --data runs/demo-data/valid --layout t=2,p=2
    """
    launch.begin("evaluate")
    # MPI is initialised by this import: before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.evaluate.run import evaluate

        as_json = options.pop("as_json")
        found = evaluate(run, world, **options)
        if world.rank == 0:
            print(json.dumps(found) if as_json else _table(found))


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['checkpoint']}: step {found['step']}, {found['layout']}, {found['precision']}"
    ]
    named = [(one["dataset"], one) for one in found["perplexity"]]
    named += [(one["file"], one) for one in found["tasks"]]
    named += [(one["file"], one) for one in found.get("code", [])]
    named += list(found.get("lm_eval", {}).items())
    for title, values in named:
        lines += ["", title]
        for key, value in values.items():
            if isinstance(value, dict):
                for name, one in value.items():
                    share = "-" if one["accuracy"] is None else f"{one['accuracy']:.4f}"
                    shown = f"{share} of {one['items']:,}"
                    lines.append(f"  {f'accuracy of {name}':<28} {shown:>16}")
            elif key not in ("dataset", "file", "alias", "kind"):
                lines.append(f"  {key.replace('_', ' '):<28} {_shown(value):>16}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    """A value of the harness, which may be a word: N/A of a spread that was not asked for."""
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
