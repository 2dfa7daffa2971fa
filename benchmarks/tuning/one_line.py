"""An instruction task made from Python's standard library: the model must say in one line what a
function does.

`python -m benchmarks.tuning.one_line FOLDER` writes the files of the task into FOLDER. A prompt is
the source of a short function without its docstring. The right answer is the docstring's first
line. Two calls with the same version of Python write the same files. Functions for training and for
validation are from different modules, and no answer occurs twice.
"""

import ast
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ASKED = "Say in one line what this Python function does.\n\n"
# the minimum and the maximum number of characters of a function's source, and of an answer
SOURCE = (60, 400)
ANSWER = (20, 80)
HELD_OUT = 8  # every HELD_OUT-th module is for validation
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source without the docstring, the docstring's first line) for the functions in a
    file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # skip files that test Python's parser
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        line = (ast.get_docstring(node) or "").partition("\n")[0].strip()
        if not line.endswith(".") or not ANSWER[0] <= len(line) <= ANSWER[1]:
            continue
        node.body = node.body[1:] or [ast.Pass()]
        source = ast.unparse(node)
        if SOURCE[0] <= len(source) <= SOURCE[1]:
            yield source, line


def write(folder: Path) -> dict[str, int]:
    """Write `train.jsonl` and `valid.jsonl` into the folder. Return the number of examples in each
    file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.parts)]
    seen: set[str] = set()
    parts: dict[str, list[str]] = {"train": [], "valid": []}
    counts: Counter[str] = Counter()
    for number, path in enumerate(paths):
        name = "valid" if number % HELD_OUT == 0 else "train"
        for source, line in functions(path):
            if line not in seen:
                seen.add(line)
                parts[name].append(json.dumps({"prompt": ASKED + source, "answer": line}))
                counts[name] += 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return dict(counts)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
