"""The tree of docs/house.md, by what each module says of itself.

`python -m tests._tree` writes it.
"""

import ast
import subprocess

from tests.parallel import ROOT

FOLDERS = ("src/ptdmpi", "data_prep", "jobs", "benchmarks")
HOUSE = ROOT / "docs" / "house.md"
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- end of tree -->"


def tree() -> str:
    """One line for each file, folder by folder: its name, and for a module what it says it is."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    lines, folder = [], ""
    for path in sorted(found.stdout.split(), key=lambda path: path.rpartition("/")[::2]):
        here, _, name = path.rpartition("/")
        file = ROOT / path
        if not file.exists() or (name == "__init__.py" and not file.read_text().strip()):
            continue
        if here != folder:
            folder = here
            lines.append(f"{here}/")
        lines.append(f"  {name:<22}{_purpose(file)}".rstrip())
    return "\n".join(lines) + "\n"


def _purpose(file) -> str:
    """The first line of a module's docstring, without its full stop; of other files nothing."""
    if file.suffix != ".py":
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0].rstrip(".")


def updated(page: str) -> str:
    """`page` with the tree as it is now."""
    head, rest = page.split(BEGIN, 1)
    return head + BEGIN + tree() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    HOUSE.write_text(updated(HOUSE.read_text(encoding="utf-8")), encoding="utf-8")
