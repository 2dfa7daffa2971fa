"""Convert the links of a page, which are written for readers of the repository, to links of the
site.

Pages link to files by paths in the repository. A link to a page becomes a link within the site. A
link to another existing file becomes plain text. A link to a missing file is an error.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import join, normpath, relpath

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
# Maps each page that is not in docs/ to its path on the site.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "jobs/README.md": "how-to/jobs.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
}


class BrokenLinkError(Exception):
    """An error: a link of a page names a file that does not exist."""


def for_site(text: str, page: str) -> str:
    """Return the text of the page at the path `page` of the repository, with links that work on the
    site."""
    here = OUTSIDE.get(page, page.removeprefix("docs/"))

    def replaced(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if re.match(r"https?:|mailto:|#", target):
            return match[0]
        path, sharp, anchor = target.partition("#")
        wanted = normpath(join(str(PurePosixPath(page).parent), path))
        place = OUTSIDE.get(wanted)
        if wanted == "README.md":
            place = "index.md"
        elif wanted.startswith("docs/"):
            place = wanted.removeprefix("docs/")
        if place is not None:
            folder = str(PurePosixPath(here).parent)
            return f"{picture}[{words}]({relpath(place, folder)}{sharp}{anchor})"
        if not (ROOT / wanted).exists():
            raise BrokenLinkError(f"{page}: {target} does not exist")
        return words

    return LINK.sub(replaced, text)
