"""Draw the architecture: the layers of the import contract in pyproject.toml, one band each."""

import re
import tomllib
from pathlib import Path

from manual.svg import BLUE, GREY, PALE, Drawing, Style

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ROOT / "docs" / "explanation" / "house.md"
CONTRACT = "folders are layers"
WIDTH, BAND, GAP, NAMES, MARGIN = 980.0, 40.0, 6.0, 330.0, 16.0


def layers() -> list[list[str]]:
    """Return the layers from the top to the bottom, each as the folders that share it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    contract = next(entry for entry in contracts if entry["name"] == CONTRACT)
    return [re.findall(r"\w+", layer) for layer in contract["layers"]]


def purposes() -> dict[str, str]:
    """Return folder of `src/ptdmpi` -> its line in the table of docs/explanation/house.md."""
    rows = re.findall(r"^\| `src/ptdmpi/([\w/.]+?)/?` \| (.*) \|$", HOUSE.read_text("utf-8"), re.M)
    return {name.removesuffix(".py"): purpose for name, purpose in rows}


def drawing() -> str:
    """Return the picture as SVG."""
    bands = layers()
    lines = purposes()
    height = 2 * MARGIN + 28 + len(bands) * (BAND + GAP)
    picture = Drawing(WIDTH, height)
    heading = "A module imports only from bands below its own, or from its own folder."
    picture.text(MARGIN, MARGIN + 14, heading, Style(size=14, weight="bold"))
    y = MARGIN + 28
    for folders in bands:
        picture.box((MARGIN, y, WIDTH - 2 * MARGIN, BAND), PALE)
        width = (NAMES - GAP) / len(folders) - GAP
        for number, folder in enumerate(folders):
            x = MARGIN + GAP + number * (width + GAP)
            picture.box((x, y + 6, width, BAND - 12), BLUE)
            middle = Style(size=13, color="#ffffff", weight="bold", anchor="middle")
            picture.text(x + width / 2, y + BAND / 2 + 5, folder, middle)
        purpose = "; ".join(lines[folder].split(":")[0].rstrip(".") for folder in folders)
        small = Style(size=12 if len(purpose) < 95 else 10.5)
        picture.text(MARGIN + NAMES + 12, y + BAND / 2 + 4, purpose, small)
        y += BAND + GAP
    picture.text(
        WIDTH - MARGIN,
        MARGIN + 14,
        "drawn from pyproject.toml",
        Style(size=11, color=GREY, anchor="end"),
    )
    return picture.svg()
