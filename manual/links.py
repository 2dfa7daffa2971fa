"""Turn the links of a page, written for readers of the repository, into those of the site.

Pages link to files by their place in the repository. A link to a page becomes a link within the
site, one to another file that exists becomes plain text, and anything else is an error.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import join, normpath, relpath

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
# Pages that are not in docs/ -> their places on the site.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "jobs/README.md": "how-to/jobs.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
}


class BrokenLinkError(Exception):
    """A link of a page names nothing that is there."""


def for_site(text: str, page: str) -> str:
    """Return the text of `page` (a place in the repository) with the links of the site."""
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
            raise BrokenLinkError(f"{page}: {target} is not there")
        return words

    return LINK.sub(replaced, text)
