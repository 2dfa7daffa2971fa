"""The documents name what is there: files, folders, keys, messages, the lines of a step."""

import ast
import html
import re
from functools import cache

import click
import pytest

from manual import architecture, commands, configuration, gallery, step, step_path
from ptdmpi.cli import group
from ptdmpi.config.presets import model_presets
from tests.parallel import ROOT

HOUSE = "docs/explanation/house.md"
TROUBLES = ROOT / "docs/how-to/troubleshooting.md"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("jobs/*.md")],
)


@cache
def texts_of_the_source() -> list[str]:
    """Every string in the source of both programs, with "…" for each value that is put in."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    return [
        configuration.literal(node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def is_printed(message: str) -> bool:
    """Return True if a string of the source has the parts of `message` around "…", in order."""
    parts = [part.strip() for part in message.split("…")]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(text) for text in texts_of_the_source())


def test_messages_of_troubleshooting_are_in_the_source():
    text = TROUBLES.read_text(encoding="utf-8")
    messages = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    assert len(messages) > 10
    rows = re.findall(r"^\| `([^`|]+)` \|", text, re.MULTILINE)
    assert len(rows) == 2
    messages += rows
    assert [message for message in messages if not is_printed(message)] == []
    assert not is_printed("the … has no such message")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_name_files_that_are_there(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    generated = {"architecture.svg", "step.svg"}
    local = [name for name in targets if not re.match(r"https?:|mailto:", name)]
    missing = [name for name in local if not (page.parent / name).exists()]
    assert [name for name in missing if name.rpartition("/")[2] not in generated] == []


NAMES = "|".join(group.list_commands(click.Context(group)))
COMMAND = re.compile(rf"mpirun -n|python -m|ptdmpi (?:{NAMES}) ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_on_lines_of_their_own(page):
    """A formatter of prose joins the lines of an indented block if it takes it for a paragraph."""
    indented = re.findall(r"^    .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [line for line in indented if COMMAND.search(line.partition("  #")[2])] == []


def test_walks_for_contributors_name_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]*)`", text)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_walks_of_the_house_name_files_that_are_there():
    text = (ROOT / HOUSE).read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert len(named) > 30
    places = (ROOT / "src" / "ptdmpi", ROOT)
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert missing == []


def test_every_folder_has_its_line():
    text = (ROOT / HOUSE).read_text(encoding="utf-8")
    folders = [path.parent.name for path in (ROOT / "src" / "ptdmpi").glob("*/__init__.py")]
    assert [name for name in folders if f"| `src/ptdmpi/{name}/` |" not in text] == []
    drawn = {name for layer in architecture.layers() for name in layer}
    assert drawn == architecture.purposes().keys() & drawn


def test_every_key_is_documented():
    words = configuration.words()
    assert words.keys() == configuration.sections().keys()
    for section, model in configuration.sections().items():
        early = {key for part, key in configuration.RESOLVED_EARLY if part == section}
        assert words[section].keys() == model.model_fields.keys() | early, section
        assert all(text["meaning"].endswith(".") for text in words[section].values())


def test_the_configuration_page_is_drawn():
    page = configuration.page()
    assert "`threads` | integer, at least 1, at most 1,024 | `1` | threads per rank | " in page
    assert "| layers | refused | l, the number of transformer layers." in page
    assert "run.spare\\_ranks = … needs run.on\\_failure" in page
    assert "`seq_length` | integer, at least 1 | **required** | tokens" in page


def test_pictures_are_drawn():
    assert "engine" in architecture.drawing()
    assert "F1.2" in step.drawing() and "F0.0-&gt;1" in step.drawing()
    named = {picture.file for chapter in gallery.CHAPTERS for picture in chapter.pictures}
    there = {path.name for path in gallery.PICTURES.iterdir()}
    assert named == there


def test_every_option_has_a_meaning():
    options = [
        (name, option)
        for name, command in commands.commands()
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    assert len(options) > 100
    assert [(name, option.opts) for name, option in options if not option.help] == []


@pytest.mark.parametrize("draw", [architecture.drawing, step.drawing])
def test_texts_end_inside_their_boxes(draw):
    """In a common sans-serif font, a character is about half as wide as high."""
    picture = draw()
    number = r"([\d.]+)"
    form = rf'<rect x="{number}" y="{number}" width="{number}" height="{number}"'
    boxes = [tuple(map(float, box)) for box in re.findall(form, picture)]
    form = rf'<text x="{number}" y="{number}" font-size="{number}"[^>]*anchor="start">([^<]+)<'
    for x, y, size, words in re.findall(form, picture):
        around = [b for b in boxes if b[0] <= float(x) <= b[0] + b[2]]
        around = [b for b in around if b[1] <= float(y) <= b[1] + b[3]]
        right = min((left + width for left, _, width, _ in around), default=step.WIDTH)
        assert float(x) + 0.52 * float(size) * len(html.unescape(words)) <= right, words


def test_the_path_of_a_step_is_short_and_counted():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"(\d+) files with about ([\d,]+) lines", readme)
    assert stated is not None
    assert int(stated[1]) == sum(len(part.files) for part in step_path.PARTS)
    lines = int(stated[2].replace(",", ""))
    assert lines == pytest.approx(step_path.total(), rel=0.1)
    code = re.search(r"About ([\d,]+) of these lines are code", readme)
    assert code is not None
    counted = step_path.total(step_path.code_lines_of)
    assert int(code[1].replace(",", "")) == pytest.approx(counted, rel=0.05)
    assert counted <= 3_600


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_presets_of_the_pages_exist():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"--preset ([\w.-]+\w)", text)) <= model_presets().keys()
