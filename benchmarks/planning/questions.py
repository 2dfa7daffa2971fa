"""`make figures`: compute the answers and pictures in docs/explanation/questions.md by executing
the commands on the page.

Arguments select questions, as in `python -m benchmarks.planning.questions size days`.
"""

import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from click.testing import CliRunner

from benchmarks.launch import ROOT
from ptdmpi.cli import group

PAGE = ROOT / "docs/explanation/questions.md"
# pattern: a command in an indented line, and the code block with its answer
EXAMPLE = re.compile(r"^    ptdmpi ask (?P<question>[^\n]*)\n\n```\n.*?```\n", re.M | re.S)


def answered(page: str, pictures: Path, only: Collection[str] = ()) -> str:
    """Return the text of the page with new answers to its commands, or with new answers only to the
    questions `only`. The pictures of the answers are written to the folder `pictures`."""

    def answer(example: re.Match[str]) -> str:
        arguments = shlex.split(example["question"])
        if only and arguments[0] not in only:
            return example[0]
        picture = pictures / f"ask-{arguments[0]}.png"
        result = CliRunner().invoke(group, ["ask", *arguments, "--png", str(picture)])
        if result.exception is not None:
            raise result.exception
        return f"    ptdmpi ask {example['question']}\n\n```\n{result.stdout}```\n"

    return EXAMPLE.sub(answer, page)


def main() -> None:
    """Write docs/explanation/questions.md with new answers, and the pictures on this page."""
    text = answered(PAGE.read_text(encoding="utf-8"), ROOT / "docs/pictures", sys.argv[1:])
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and its pictures")


if __name__ == "__main__":
    main()
