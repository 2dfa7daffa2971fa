"""The hook of mkdocs.yml, which inserts the generated parts of pages and adds pages from outside
docs/.

A line `{{ name }}` of a page is replaced by the generated part with this name.
"""

import re
import sys
from pathlib import Path
from typing import Any

# mkdocs imports this file by its path, so the folder of the project must be added to the module
# search path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkdocs.structure.files import File, Files

from manual import architecture, commands, configuration, gallery, links, step, step_path

PARTS = {
    "commands": commands.page,
    "configuration": configuration.page,
    "gallery": gallery.page,
    "step path": step_path.page,
}
PICTURES = {
    "pictures/architecture.svg": architecture.drawing,
    "pictures/step.svg": step.drawing,
}
MARK = re.compile(r"^\{\{ ([a-z ]+) \}\}$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures that functions draw, and the pages that are not in docs/."""
    for place, draw in PICTURES.items():
        files.append(File.generated(config, place, content=draw()))
    for page, place in links.OUTSIDE.items():
        text = (links.ROOT / page).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=links.for_site(text, page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of the page with the generated parts, and with links that work on the
    site."""
    place = page.file.src_uri
    if place not in links.OUTSIDE.values():
        markdown = links.for_site(markdown, f"docs/{place}")
    return MARK.sub(lambda match: PARTS[match[1]](), markdown)
