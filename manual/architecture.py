"""Draw the architecture of the package: a band for each layer of the import contract in
pyproject.toml."""

import re
import tomllib
from pathlib import Path

from manual.svg import BLUE, GREY, PALE, Drawing, Style

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ROOT / "docs" / "explanation" / "house.md"
CONTRACT = "folders are layers"
WIDTH, MARGIN, GAP = 980.0, 16.0, 6.0
BAND, LINE, NAMES = 40.0, 18.0, 300.0


def layers() -> list[list[str]]:
    """Return the layers of the import contract from top to bottom. Each layer is a list of
    folders."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    contract = next(entry for entry in contracts if entry["name"] == CONTRACT)
    return [re.findall(r"\w+", layer) for layer in contract["layers"]]


def purposes() -> dict[str, str]:
    """Return a table that maps each folder of `src/ptdmpi` to its description in the table of
    docs/explanation/house.md."""
    rows = re.findall(r"^\| `src/ptdmpi/([\w/.]+?)/?` \| (.*) \|$", HOUSE.read_text("utf-8"), re.M)
    return {name.removesuffix(".py"): purpose.replace("`", "") for name, purpose in rows}


def drawing() -> str:
    """Return the picture as SVG."""
    bands = layers()
    lines = purposes()
    heights = [max(BAND, LINE * len(folders) + 12) for folders in bands]
    picture = Drawing(WIDTH, 2 * MARGIN + 28 + sum(heights) + GAP * len(bands))
    heading = "A module imports only from bands below its own, or from its own folder."
    picture.text(MARGIN, MARGIN + 14, heading, Style(size=14, weight="bold"))
    source = Style(size=11, color=GREY, anchor="end")
    picture.text(WIDTH - MARGIN, MARGIN + 14, "drawn from pyproject.toml", source)
    y = MARGIN + 28
    for folders, height in zip(bands, heights, strict=True):
        _band(picture, y, height, {folder: lines[folder] for folder in folders})
        y += height + GAP
    return picture.svg()


def _band(picture: Drawing, y: float, height: float, folders: dict[str, str]) -> None:
    """Draw one layer of the package: a box for each folder, with the folder's purpose."""
    picture.box((MARGIN, y, WIDTH - 2 * MARGIN, height), PALE)
    width = (NAMES - GAP) / len(folders) - GAP
    first_line = y + height / 2 - LINE * (len(folders) - 1) / 2 + 4
    for number, (folder, purpose) in enumerate(folders.items()):
        x = MARGIN + GAP + number * (width + GAP)
        picture.box((x, y + 6, width, height - 12), BLUE)
        name = Style(size=13, color="#ffffff", weight="bold", anchor="middle")
        picture.text(x + width / 2, y + height / 2 + 5, folder, name)
        words = f"{folder}: {purpose}" if len(folders) > 1 else purpose
        picture.text(MARGIN + NAMES + 12, first_line + LINE * number, words, Style(size=11.5))
