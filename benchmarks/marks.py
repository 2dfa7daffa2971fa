"""Functions that write the tables of a benchmark into a page of docs/, between two marks."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.launch import ROOT
from ptdmpi.base.disk import write_whole


def replaced(text: str, name: str, lines: Iterable[str]) -> str:
    """Return `text`, in which the lines between `<!-- NAME -->` and `<!-- end of NAME -->` are
    replaced by `lines`. Raises ValueError if the text has no such marks."""
    begin = f"<!-- {name} -->\n"
    end = f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"the page has no place for {name}")
    return before + begin + "\n".join([*lines, ""]) + end + after


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Write `lines` between the marks `name` of a page (see `replaced`), and print them."""
    write_whole(page, replaced(page.read_text(encoding="utf-8"), name, lines))
    print("\n".join(lines), f"\nwrote {page.relative_to(ROOT)}", flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)
