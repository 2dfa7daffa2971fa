"""The gallery: each picture that the project can draw, with the command that draws it."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"


class Picture(NamedTuple):
    """A picture in docs/pictures, a sentence about its content, and the command that draws it."""

    file: str
    shows: str
    command: str


class Chapter(NamedTuple):
    """A chapter of the gallery: a heading, and pictures of one kind."""

    heading: str
    pictures: tuple[Picture, ...]


def _schedule(file: str, options: str, shows: str) -> Picture:
    return Picture(file, shows, f"ptdmpi schedule {options} --png {file}")


def _answer(question: str, options: str, shows: str) -> Picture:
    file = f"ask-{question}.png"
    return Picture(file, shows, f"ptdmpi ask {question} {options} --png {file}")


PLANNED = (
    "ptdmpi plan --model gpt3-175b --cluster selene --ranks 1024 --batch 1536"
    " --layout t=8,p=8,d=16,v=3,b=1 --recompute selective"
)
FIGURES = "make figures"
# Maps the number of each figure of Narayanan et al. 2021 to a sentence about the figure.
PUBLISHED = {
    11: "Throughput of one pipeline by its number of ranks, for two batch sizes.",
    12: "Throughput of the interleaved schedule and of 1F1B.",
    13: "Throughput of combinations of tensor and pipeline parallelism.",
    14: "Throughput of combinations of data and pipeline parallelism.",
    15: "Throughput of combinations of data and tensor parallelism.",
    16: "Throughput by the microbatch size.",
    17: "Throughput with and without recomputation.",
    18: "Throughput with and without scatter and gather between stages.",
}
CHAPTERS = (
    Chapter(
        "A run: planned and measured",
        (
            Picture(
                "demo-timeline.png",
                "The pipeline of a run, as planned and as measured.",
                "ptdmpi report runs/demo",
            ),
            Picture("demo-loss.png", "The loss of a run.", "ptdmpi report runs/demo"),
            Picture(
                "comparison.png",
                "The losses of two layouts: the runs of the first tutorial.",
                "ptdmpi report runs/first runs/first-tensor",
            ),
            Picture(
                "tasks.png",
                "The accuracy on a file of three questions during a run, with standard errors.",
                "ptdmpi report runs/asked",
            ),
            Picture(
                "plan.png", "A step of GPT-3 on 1,024 GPUs, planned.", f"{PLANNED} --png plan.png"
            ),
            Picture(
                "plan-memory.png",
                "The planned memory of a step of GPT-3 over time.",
                f"{PLANNED} --memory-png plan-memory.png",
            ),
        ),
    ),
    Chapter(
        "Schedules",
        (
            _schedule("gpipe.png", "--kind gpipe -p 4 -m 8", "GPipe."),
            _schedule("1f1b.png", "--kind 1f1b -p 4 -m 8", "1F1B."),
            _schedule("interleaved.png", "--kind interleaved -p 4 -v 2 -m 8", "Interleaved 1F1B."),
            _schedule(
                "interleaved_uneven.png",
                "--kind interleaved -p 4 -v 2 -m 6",
                "Interleaved 1F1B with 6 microbatches on 4 ranks.",
            ),
            _schedule("zb_h1.png", "--kind zb-h1 -p 4 -m 8", "ZB-H1, with a split backward."),
            _schedule(
                "zb_v.png",
                "--kind zb-v -p 4 -v 2 -m 8",
                "ZB-V, whose stages form a V over the ranks.",
            ),
        ),
    ),
    Chapter(
        "Answers about a training",
        (
            _answer(
                "ranks",
                "--model llama-65b --cluster selene --ranks 4096 --tokens 1.4e12 --days 21"
                " --price 1.5",
                "The cost of a training run by the number of ranks.",
            ),
            _answer(
                "restarts",
                "--model llama3-405b --cluster dgx-h100 --ranks 16384 --node-days 264"
                " --write-gb-s 2000 --restart-minutes 10",
                "Goodput (fraction of useful time) by the checkpoint interval.",
            ),
            _answer(
                "network",
                "--model gpt3-175b --cluster selene --ranks 1024 --pod 32",
                "The step time with slower networks.",
            ),
            _answer(
                "sweep",
                "--model llama3-8b --cluster h200 --ranks 64 --batch 512"
                " --lengths 2048,4096,8192,16384,32768",
                "Tokens per second by the sequence length.",
            ),
            _answer(
                "partition",
                "--model gpt3-175b --cluster selene --tensor 8",
                "The time of messages by the kind of partition.",
            ),
            _answer(
                "days",
                "--model llama-65b --cluster selene --ranks 2048 --tokens 1.4e12 --days 21",
                "The duration of a training run by the utilization of the GPUs.",
            ),
            _answer(
                "methods",
                "--model gpt2-355m --cluster v100-dgx2 --layout t=8,p=1,d=64,b=8 --batch 512",
                "The communication time of data-parallel methods.",
            ),
            _answer(
                "size",
                "--flops 5.76e23",
                "The loss by the size of the model, for a given number of FLOPs.",
            ),
        ),
    ),
    Chapter(
        "Figures of Narayanan et al. 2021, by the planner",
        tuple(
            Picture(f"figure-{number}.png", f"Figure {number}. {shows}", FIGURES)
            for number, shows in PUBLISHED.items()
        ),
    ),
    Chapter(
        "Measurements",
        (
            Picture(
                "curves-here.png",
                "Figures 12 to 18 at 2 and 4 ranks of one machine, predicted and measured.",
                "make curves-here",
            ),
            Picture(
                "long-sequences.png",
                "Memory and time by the length of a sequence: LLaMA 8B on H100s, predicted, and a"
                " small LLaMA on this machine, measured.",
                "python -m benchmarks.planning.long_sequences",
            ),
            Picture(
                "ring-error.png",
                "The rounding error of ring attention in float32 by the number of context ranks.",
                "python -m benchmarks.planning.ring_error",
            ),
            Picture(
                "bench.png", "Tokens per second of ptdmpi and of other trainers.", "make bench"
            ),
            Picture(
                "less-quadratic.png",
                "Communication-efficient methods on a quadratic problem.",
                "make communicate-less",
            ),
            Picture(
                "less-gpt.png",
                "Communication-efficient methods on a small GPT.",
                "make communicate-less",
            ),
            Picture(
                "table-2.png",
                "Table 2 of the paper (PTD-P and ZeRO-3), published and simulated.",
                "python -m benchmarks.network.page",
            ),
            Picture(
                "ptd-vs-zero3.png",
                "PTD-P and ZeRO-3 over a slow link, measured.",
                "python -m benchmarks.network.ptd_zero3",
            ),
            Picture(
                "lora-full.png",
                "LoRA and full fine-tuning.",
                "python -m benchmarks.tuning.lora_full MODEL",
            ),
            Picture(
                "experts.png",
                "A mixture of experts and a dense model with the same active parameters.",
                "python -m benchmarks.tuning.experts",
            ),
            Picture(
                "mup.png",
                "muP: activations by width, and losses by learning rate.",
                "python -m benchmarks.tuning.mup",
            ),
        ),
    ),
)


def page() -> str:
    """Return the generated part of docs/gallery.md."""
    parts = []
    for chapter in CHAPTERS:
        parts.append(f"## {chapter.heading}\n")
        for picture in chapter.pictures:
            parts.append(f"![{picture.shows}](pictures/{picture.file})\n")
            parts.append(f"{picture.shows}\n\n    {picture.command}\n")
    return "\n".join(parts)
