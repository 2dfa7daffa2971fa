"""`ptdmpi checkpoint`: what a person sees, what a program reads, and the exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ptdmpi.checkpoint.manifest import checksum, sound_manifest
from ptdmpi.commands.checkpoint import command
from ptdmpi.config import InputError
from tests._checkpoints import save, values
from tests.parallel import ROOT


def _run(*words) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(word) for word in words])
    if isinstance(result.exception, InputError):
        return 2, str(result.exception)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def _json(*words):
    code, output = _run(*words, "--json")
    return code, json.loads(output)


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / "run/checkpoints", step)
    return tmp_path / "run"


def _flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_inspect(run):
    newest = run / "checkpoints/step-00000003"
    code, answer = _json("inspect", newest, "--tensors")
    (found,) = answer["checkpoints"]
    assert code == 0 and found["step"] == 3 and found["samples"] == 24
    assert found["parameters"] == 127 and found["files"] == 2 and found["types"] == ["float32"]
    assert found["shapes"]["weights/table"] == [12, 10]
    assert found["bytes"] == sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    code, text = _run("inspect", newest, "--tensors")
    assert code == 0 and "12 x 10" in text and "127" in text
    assert _json("inspect", run / "checkpoints/latest")[1]["checkpoints"][0]["step"] == 3
    (run / "checkpoints/step-00000002/manifest.json").unlink()
    code, answer = _json("inspect", run)
    assert code == 1 and [one["problem"] is None for one in answer["checkpoints"]] == [
        True,
        False,
        True,
    ]
    assert "not complete: " in _run("inspect", run)[1]


def test_verify(run):
    assert _run("verify", run)[0] == 0
    _flip(run / "checkpoints/step-00000002/rank-00000.safetensors")
    _flip(run / "checkpoints/step-00000003/rank-00000.safetensors", 12)  # in the header
    code, answer = _json("verify", run)
    problems = list(answer["problems"].values())
    assert code == 1 and problems[0] == []
    assert len(problems[1]) == 1 and "weights/bias#1 is damaged" in problems[1][0]
    assert len(problems[2]) == 1 and "header is damaged" in problems[2][0]
    assert "step-00000002: damaged" in _run("verify", run)[1]


def test_verify_does_not_wait_for_a_pipe(run):
    file = run / "checkpoints/step-00000002/rank-00000.safetensors"
    file.unlink()
    os.mkfifo(file)
    done = subprocess.run(
        [sys.executable, "-m", "ptdmpi", "checkpoint", "verify", str(run)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "rank-00000.safetensors: is a pipe or a device, not a file" in done.stdout


def _table(checkpoint):
    """The manifest as JSON, without its checksum."""
    table = json.loads((checkpoint / "manifest.json").read_text())
    del table["crc32"]
    return table


def _forge(checkpoint, change):
    """Change the manifest and give it a fitting checksum, as a faulty writer would."""
    manifest = _table(checkpoint)
    change(manifest["tensors"]["weights/table"]["pieces"], manifest)
    crc32 = checksum(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "crc32": crc32}))


def _move(pieces, manifest):
    pieces[0]["start"][0], pieces[0]["stop"][0] = 1, 7


def _drop(pieces, manifest):
    del pieces[1]


def _outside(pieces, manifest):
    pieces[1]["start"][0], pieces[1]["stop"][0] = 7, 13


@pytest.mark.parametrize(
    ("change", "words"),
    [(_move, "overlap"), (_drop, "hold 60 elements of 120"), (_outside, "outside of shape")],
)
def test_verify_finds_gaps_and_overlaps(tmp_path, change, words):
    checkpoint = save(tmp_path, cut=(2, 1))
    _forge(checkpoint, change)
    code, text = _run("verify", checkpoint)
    assert code == 1 and words in text


def _paths(value, path=()):
    """Where something stands in a tree of JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inside:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from _paths(one, (*path, key))


@pytest.mark.cases(4)
@pytest.mark.parametrize("value", ["nothing", None, "x", -1, [], {}, [5], 1e300, True])
def test_a_forged_manifest_is_told_in_one_line(tmp_path, value):
    """Keys that are missing or of another kind, under a checksum that holds."""
    checkpoint, sound = save(tmp_path / "a", cut=(2, 1)), save(tmp_path / "b")
    whole = _table(checkpoint)
    for path in list(_paths(whole)):
        if path == ("format_version",):
            continue
        forged = json.loads(json.dumps(whole))
        place = forged
        for key in path[:-1]:
            place = place[key]
        if value == "nothing":
            del place[path[-1]]
        else:
            place[path[-1]] = value
        crc32 = checksum(forged)
        (checkpoint / "manifest.json").write_text(json.dumps({**forged, "crc32": crc32}))
        try:
            sound_manifest(checkpoint)
        except InputError as error:
            assert "\n" not in str(error)
        for words in (("inspect", checkpoint), ("verify", checkpoint), ("diff", sound, checkpoint)):
            code, text = _run(*words)
            assert code in (0, 1, 2) and "Traceback" not in text, (path, words)


def test_diff_of_equal_tensors_in_other_pieces(tmp_path):
    a, b = save(tmp_path / "a"), save(tmp_path / "b", cut=(2, 5))
    assert _run("diff", a, b) == (0, "equal to the bit\n")
    assert _json("diff", a, b)[1]["differences"] == []


def test_diff_names_what_differs(tmp_path):
    tensors = values()
    greatest = float(np.abs(tensors["weights/table"]).max())
    tensors["weights/table"][5, 3] += 0.5
    del tensors["weights/bias"]
    a, b = save(tmp_path / "a"), save(tmp_path / "b", 4, tensors, cut=(3, 2))
    code, answer = _json("diff", a, b)
    found = {one["name"]: one for one in answer["differences"]}
    assert code == 1 and "only in" in found["weights/bias"]["what"]
    table = found["weights/table"]
    assert table["what"] == "1 of 120 elements"
    assert table["greatest_absolute"] == pytest.approx(0.5, rel=1e-6)
    assert table["greatest_relative"] == pytest.approx(0.5 / greatest, rel=1e-6)
    assert found["progress/step"]["what"] == "3 and 4"
    assert "weights/table" in _run("diff", a, b)[1]


def test_diff_says_once_that_a_kind_of_tensors_is_in_one_alone(tmp_path):
    moments = {name.replace("weights", "exp_avg"): value for name, value in values().items()}
    a = save(tmp_path / "a", tensors={**values(), **moments})
    for pair in ((a, save(tmp_path / "b")), (save(tmp_path / "c"), a)):
        found = _json("diff", *pair)[1]["differences"]
        assert [(one["name"], one["what"]) for one in found] == [
            (f"exp_avg/* ({len(moments)})", f"only in {a}")
        ]


def test_diff_sees_bits_types_and_not_a_number(tmp_path):
    tensors = values()
    tensors["weights/table"][0, 0], tensors["weights/bias"][0] = 0.0, np.nan
    a = save(tmp_path / "a", tensors=tensors)
    assert _run("diff", a, a)[0] == 0  # the same not-a-number
    tensors["weights/table"][0, 0], tensors["weights/bias"][0] = -0.0, 1.0
    found = _json("diff", a, save(tmp_path / "b", tensors=tensors))[1]["differences"]
    assert [one["greatest_absolute"] for one in found] == [None, 0.0]
    wide = save(tmp_path / "c", tensors=values(dtype="float64"))
    code, text = _run("diff", save(tmp_path / "d"), wide)
    assert code == 1 and "types float32 and float64" in text


def test_prune(run):
    code, text = _run("prune", run, "--keep", 1, "--keep-every", 2, "--dry-run")
    assert code == 0 and "would remove" in text and text.count("\n") == 1
    assert len(list((run / "checkpoints").glob("step-*"))) == 3
    code, text = _run("prune", run / "checkpoints/latest", "--keep", 1)
    assert code == 2 and "is one checkpoint" in text
    _, answer = _json("prune", run, "--keep", 1, "--keep-every", 2)
    assert [Path(one).name for one in answer["removed"]] == ["step-00000001"]
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["latest", "step-00000002", "step-00000003"]
    assert _run("prune", run, "--keep", 2)[1] == "nothing to remove\n"


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "prune"])
def test_bad_input_is_exit_code_2(tmp_path, verb):
    words = {"diff": [tmp_path, tmp_path], "prune": [tmp_path, "--keep", 1]}
    code, text = _run(verb, *words.get(verb, [tmp_path / "nowhere"]))
    assert code == 2 and "no checkpoint" in text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../elsewhere"])
def test_a_damaged_latest_is_one_line(run, content):
    (run / "checkpoints/latest").write_bytes(content)
    code, text = _run("inspect", run / "checkpoints/latest")
    assert code == 2 and "names no checkpoint" in text


NO_TORCH = """
import sys
from pathlib import Path

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mpi4py", "torch"):
            raise ImportError(f"{name} is not for the command line")

sys.meta_path.insert(0, Blocker())
from ptdmpi.cli import main
main()
"""


def test_neither_mpi_nor_torch_is_needed(run):
    command = [sys.executable, "-c", NO_TORCH, "checkpoint", "verify", str(run)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.count(": sound") == 3, result.stderr
