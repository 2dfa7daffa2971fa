"""A run before it starts: --dry-run, `ptdmpi plan CONFIG` and `ptdmpi init`."""

import copy
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit
from click.testing import CliRunner

from ptdmpi.commands.init import command as init
from ptdmpi.commands.plan import command as plan
from ptdmpi.commands.train import command as train
from ptdmpi.config import InputError, resolve
from ptdmpi.config.choices import CONTEXT_METHODS
from ptdmpi.data.batches import TrainBatches
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import begun
from ptdmpi.plan.cost import relief
from ptdmpi.plan.cost.traffic import StepTraffic
from ptdmpi.preview.as_text import as_text
from ptdmpi.preview.dry_run import show
from ptdmpi.preview.forecast import preview
from ptdmpi.preview.ranks import RankCount, needed_ranks
from ptdmpi.train.feed import open_datasets
from tests._configs import tree
from tests.parallel import mpirun
from tests.report._made import made, record

ONE = RankCount(1, "this one", 1)


def configured(corpus: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    where = {
        "data.train": [{"path": str(corpus / "data/train")}],
        "data.valid": str(corpus / "data/valid"),
        "run.dir": str(corpus / "run"),
    }
    return tree({**where, **(changes or {})})


def snapshot(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_it_says_what_the_run_will_do_and_writes_nothing(corpus):
    asked = configured(corpus)
    before = snapshot(corpus)
    forecast = preview(asked, ONE)
    assert snapshot(corpus) == before
    config = resolve(asked, 1)
    datasets, _ = open_datasets(config)
    order = Course(config, begun(config, datasets)).order
    batches = TrainBatches(
        datasets, order, 16, global_size=8, micro_size=2, data_rank=0, data_size=1
    )
    drawn = batches.step(0)[0].inputs
    shown = forecast["batch"]["samples"]
    assert [sample["ids"] for sample in shown] == drawn[:2].tolist()
    for sample, row in zip(shown, drawn.tolist(), strict=False):
        assert sample["text"] == "".join(chr(id) if id < 256 else "<|endoftext|>" for id in row)
    assert forecast["memory"]["bytes"] == relief.Step.of(config, 257).largest()[1].total
    assert forecast["memory"]["fits"] is True and "mistake" not in forecast
    assert forecast["train"][0]["drawn"] == 40 and forecast["tokens"] == 5 * 8 * 16
    assert forecast["resume"] == {"step": 0, "path": None, "changed": [], "says": "begins anew"}
    assert forecast["time"]["step_s"] is None and forecast["checkpoint"]["fits"]


def test_no_value_of_the_configuration_controls_the_terminal(corpus, capsys):
    with pytest.raises(InputError, match=r"run\.dir = 'red\\x1b.*control characters"):
        show(configured(corpus, {"run.dir": "red\x1b[31m"}), 1)


def test_shards_with_remarks_are_said_to_be_unread(corpus):
    forecast = preview(configured(corpus), ONE) | {"remarks": ["log-probabilities of a model"]}
    text = "of a model; opened, but not read through; to do that: ptdmpi-data verify"
    assert text in " ".join(as_text(forecast).split())


def test_what_does_not_fit_is_told_with_the_rest(corpus, monkeypatch):
    monkeypatch.setattr("ptdmpi.preview.forecast.rank_memory_bytes", lambda *machine: 1000)
    forecast = preview(configured(corpus), ONE)
    assert forecast["memory"]["fits"] is False
    assert "does not fit into memory" in forecast["mistake"] and "weights" in forecast["mistake"]
    forecast = preview(configured(corpus), RankCount(1, "given", 0))
    assert forecast["memory"]["fits"] is None and "mistake" not in forecast


def test_messages_are_shown_by_group_of_ranks(corpus):
    """Those of rank 0, as the closed forms count them: context apart from tensor and data."""
    asked = configured(corpus, {"parallel.tensor": 2, "parallel.context": 2})
    forecast = preview(asked, RankCount(4, "given", 0))
    expected = StepTraffic.of_config(resolve(asked, 4), 257).of(0)
    assert forecast["sent"]["is_exact"]
    found = forecast["sent"]["traffic"]
    assert set(found) == {"tensor", "context"}
    for group, kinds in found.items():
        assert {kind: n["bytes"] for kind, n in kinds.items()} == expected.sent_bytes[group]
        assert {kind: n["messages"] for kind, n in kinds.items()} == expected.messages[group]
    text = as_text(forecast)
    assert re.search(r"messages +rank 0 sends in a step\n +tensor: .*\n +context: .*gathers", text)
    assert "rank 0 sends" not in as_text(preview(configured(corpus), ONE))


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_the_context_method_is_named(corpus, method):
    asked = configured(corpus, {"parallel.context": 2, "parallel.context_method": method})
    assert f"context {method}" in preview(asked, RankCount(2, "given", 0))["layout"]
    alone = configured(corpus, {"parallel.context_method": method})
    assert method not in preview(alone, ONE)["layout"]


def test_state_off_a_gpu_is_held_against_its_host(corpus, monkeypatch):
    """It does not count as memory of the GPU; the run decides the same."""
    asked = configured(corpus, {"parallel.offload": "optimizer"})
    step = relief.Step.of(resolve(asked, 1), 257, on_host=False)
    has = {"cuda": step.largest()[1].total, "cpu": step.on_hosts()}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("ptdmpi.preview.forecast._here", lambda ranks: (has["cuda"], "of a GPU"))
    module = "ptdmpi.preview.forecast.rank_memory_bytes"
    monkeypatch.setattr(module, lambda device, ranks: has[device.type])
    forecast = preview(asked, ONE)
    assert forecast["memory"]["fits"] is True and forecast["memory"]["bytes"] == has["cuda"]
    has["cpu"] -= 1
    forecast = preview(asked, ONE)
    assert forecast["memory"]["fits"] is False and "memory of the host" in forecast["mistake"]


def test_copies_in_memory_are_shown_and_counted(corpus):
    """On one node twice the state, on two nodes four times each rank's share."""
    asked = configured(corpus, {"checkpoint.memory_every_steps": 2})
    for ranks, times in ((ONE, 2), (RankCount(2, "as were started", 1), 2)):
        forecast = preview(asked, ranks)
        assert (
            forecast["memory"]["parts_bytes"]["copies"] == times * forecast["checkpoint"]["bytes"]
        )
        assert "copies" in as_text(forecast)
    gpus = preview(asked, ONE, "selene")
    assert gpus["memory"]["host_bytes"] == 2 * gpus["checkpoint"]["bytes"]
    assert "a rank on the host" in as_text(gpus)


def test_shard_groups_are_of_the_nodes_that_were_started_on(corpus):
    """The preview takes the groups that the run would choose: 4 ranks on nodes of 2."""
    asked = configured(corpus, {"parallel.zero": 3, "parallel.shard_group": "node"})
    asked["batch"].update(global_size=8, micro_size=1)
    assert "ZeRO 3 in 2 shards" in preview(asked, RankCount(4, "as were started", 2))["layout"]
    assert "ZeRO 3 in 4 shards" in preview(asked, RankCount(4, "given", 0))["layout"]


def test_time_comes_from_the_cluster_or_from_the_run_itself(corpus, tmp_path):
    asked = configured(corpus, {"run.dir": str(tmp_path / "run"), "precision.compute": "fp32"})
    forecast = preview(asked, ONE, "cpu-avx2")["time"]
    assert forecast["from"] == "predicted" and forecast["total_s"] == 5 * forecast["step_s"] > 0
    layout = "t=1,p=1,d=1,v=1,b=2"
    made(tmp_path / "run", 5, record(1, 3.0, layout=layout, step_time_s=7.0))
    assert preview(asked, ONE)["time"]["step_s"] == 7.0
    cheap = configured(corpus, {"run.dir": str(tmp_path / "run"), "optimizer.learning_rate": 1e-5})
    assert preview(cheap, ONE)["time"]["step_s"] == 7.0
    for key, value in (
        ("batch.micro_size", 4),
        ("optimizer.kind", "sgd"),
        ("precision.compute", "bf16"),
        ("run.compile", True),
        ("parallel.zero", 1),
    ):
        changed = configured(corpus, {"run.dir": str(tmp_path / "run"), key: value})
        assert preview(changed, ONE)["time"]["step_s"] is None, key
    (tmp_path / "run/config.toml").write_text("[run]\nname = 'run'\nsteps = 5\n")
    assert preview(asked, ONE)["time"]["step_s"] is None


def test_the_text_of_a_preview_names_what_can_be_done(corpus):
    text = as_text(preview(configured(corpus), RankCount(1, "given", 0)))
    for name in ("train", "valid"):
        assert f"ptdmpi-data verify {corpus / 'data' / name}" in text
    assert "a rank; the memory that a rank has is not known: set run.cluster" in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.valid", "nowhere", "nowhere"),
        ("model.heads", 5, "model.heads = 5"),
        ("run.dir", "text.jsonl/run", "not a directory that can be written to"),
        ("checkpoint.resume", "nowhere", "checkpoint.resume = nowhere: "),
        ("log.tasks", ["nowhere.jsonl"], "log.tasks: nowhere.jsonl: No such file"),
    ],
)
def test_mistakes_are_those_of_the_run(corpus, monkeypatch, key, value, words):
    monkeypatch.chdir(corpus)
    with pytest.raises(InputError, match=words):
        preview(configured(corpus, {key: value}), ONE)


def test_a_run_that_is_over_says_so(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("ptdmpi.preview.resume.newest", lambda path: path / "step-00000003")
    monkeypatch.setattr("ptdmpi.preview.resume.files.checkpoints_in", lambda path: [path])
    progress = SimpleNamespace(progress=SimpleNamespace(step=3), said={})
    monkeypatch.setattr("ptdmpi.preview.resume.sound_manifest", lambda path: progress)
    monkeypatch.setattr("ptdmpi.preview.resume.require_kinds", lambda *_: None)
    monkeypatch.setattr(Course, "judge", lambda *_: None)
    worse = [{"step": n, "validation_loss": 1.0 + n} for n in (1, 2, 3)]
    made(tmp_path / "run", 5, *worse)
    changes = {
        "run.dir": str(tmp_path / "run"),
        "run.stop_after_worse": 2,
        "log.validate_every_steps": 1,
    }
    forecast = preview(configured(corpus, changes), ONE)
    assert (
        "is over, stopped early after step 3: run.stop_after_worse = 2"
        in forecast["resume"]["says"]
    )
    assert "legal: a higher run.stop_after_worse" in as_text(forecast)
    assert f"ptdmpi-data verify {corpus / 'data/train'}" in as_text(forecast)
    forecast = preview(configured(corpus, {**changes, "run.steps": 3}), ONE)["resume"]["says"]
    assert "nothing to train" in forecast and "legal: run.steps above 3" in forecast


def test_how_many_ranks_a_configuration_speaks_of():
    assert needed_ranks(tree({"parallel.tensor": 2, "parallel.pipeline": 2})) == (4, False)
    assert needed_ranks(tree({"parallel.data": 3, "run.spare_ranks": 1})) == (4, True)
    assert needed_ranks({"parallel": "no section", "run": {"spare_ranks": "many"}}) == (1, False)


@pytest.mark.long
def test_a_run_that_init_wrote_trains_resumes_and_is_previewed(corpus, monkeypatch):
    """Call the commands as a user does, with one training on two ranks."""
    monkeypatch.chdir(corpus)
    sizes = "l=2,h=32,a=4,s=32"
    words = ["first.toml", "--data", "data", "--ranks", "2", "--model", sizes, "--steps", "4"]
    made = CliRunner().invoke(init, words)
    assert made.exit_code == 0 and "wrote first.toml" in made.stdout
    with pytest.raises(InputError, match="exists already"):
        CliRunner().invoke(init, words, catch_exceptions=False)
    written = tomllib.loads(Path("first.toml").read_text())
    assert written["data"]["valid"] == "data/valid" and written["run"]["name"] == "first"
    before = snapshot(corpus)
    for command, options in ((train, ["--dry-run"]), (plan, [])):
        shown = CliRunner().invoke(command, ["first.toml", *options, "--ranks", "2", "--json"])
        assert json.loads(shown.stdout)["resume"]["step"] == 0, shown.output
    shown = CliRunner().invoke(plan, ["first.toml", "--ranks", "2"])
    assert "begins anew" in shown.stdout and "| " in shown.stdout and "fox" in shown.stdout
    assert snapshot(corpus) == before
    mpirun(2, ["-m", "ptdmpi", "train", "first.toml"], cwd=corpus)
    assert json.loads(Path("runs/first/done").read_text()) == {"steps": 4}
    assert "validation loss" in Path("runs/first/log.txt").read_text()
    again = ["first.toml", "--dry-run", "--json", "--ranks", "2", "--set", "run.steps=8"]
    forecast = json.loads(CliRunner().invoke(train, again).stdout)
    assert forecast["resume"]["step"] == 4 and forecast["batch"]["step"] == 5
    assert forecast["time"]["steps"] == 4 and forecast["time"]["step_s"] > 0
    slower = [*again, "--set", "optimizer.learning_rate=1e-5"]
    forecast = json.loads(CliRunner().invoke(train, slower).stdout)
    assert any("optimizer.learning_rate" in change for change in forecast["resume"]["changed"])
    with pytest.raises(InputError, match=r"run\.seed 1234 -> 7"):
        CliRunner().invoke(train, [*again, "--set", "run.seed=7"], catch_exceptions=False)
    for changed, message in (
        (
            "optimizer.kind=muon",
            r"has no momentum_buffer but exp_avg and exp_avg_sq \(optimizer.kind",
        ),
        ("model.layers=3", "layers"),
    ):
        with pytest.raises(InputError, match=message):  # as the run
            CliRunner().invoke(train, [*again, "--set", changed], catch_exceptions=False)
    never = [*again, "--set", "checkpoint.resume=never"]
    assert "set aside" in json.loads(CliRunner().invoke(train, never).stdout)["resume"]["says"]


def test_what_a_preview_has_no_use_for_is_refused(corpus, monkeypatch):
    monkeypatch.chdir(corpus)
    Path("c.toml").write_text(tomlkit.dumps(configured(corpus)))
    for wrong in (
        ["--lora", "8"],
        ["--layout", "t=1"],
        ["--no-scatter-gather"],
        ["--png", "x.png"],
    ):
        with pytest.raises(InputError, match=f"^{wrong[0].replace('no-', '')}: cannot be combined"):
            CliRunner().invoke(plan, ["c.toml", "--ranks", "1", *wrong], catch_exceptions=False)
    with pytest.raises(InputError, match=r"gpt3-125m is a preset.*: ptdmpi plan --model gpt3-125m"):
        CliRunner().invoke(plan, ["gpt3-125m", "--batch", "8"], catch_exceptions=False)
    fine = CliRunner().invoke(plan, ["c.toml", "--ranks", "1", "--json", "--quiet"])
    assert fine.exit_code == 0, fine.output


@pytest.mark.long
def test_previewing_needs_no_mpi(corpus):
    """No GPU or launcher is needed: this may run on a login node."""
    code = "import sys; sys.modules['mpi4py'] = None\nfrom ptdmpi.cli import main; main()"
    (corpus / "c.toml").write_text(tomlkit.dumps(configured(corpus)))
    words = [sys.executable, "-c", code, "plan", str(corpus / "c.toml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "  | " in done.stdout, done.stderr


def test_how_many_ranks_and_why(corpus, tmp_path):
    """The layout fixes it, or gives the least number and a hint; --ranks goes first."""
    path = tmp_path / "c.toml"

    def ranks(parallel: dict[str, int], *options: str) -> tuple[int, str]:
        changes = {f"parallel.{key}": size for key, size in parallel.items()}
        path.write_text(tomlkit.dumps(configured(corpus, changes)))
        result = CliRunner().invoke(plan, [str(path), "--json", *options], catch_exceptions=False)
        forecast = json.loads(result.stdout)
        return forecast["ranks"], forecast["ranks_from"]

    assert ranks({"data": 2}) == (2, "as parallel.tensor, pipeline and data say")
    fewest, why = ranks({"tensor": 2})
    assert fewest == 2 and why.startswith("the fewest: ") and "set --ranks" in why
    assert ranks({}, "--ranks", "1") == (1, "as --ranks says")
    assert ranks({}, "--ranks", "4") == (4, "as --ranks says")


def test_a_dry_run_searches_the_layout_and_writes_nothing(corpus, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(tomlkit.dumps(configured(corpus, {"precision.compute": "fp32"})))
    before = snapshot(corpus)

    def output(*options: str) -> str:
        words = [str(path), "--dry-run", "--layout", "auto", *options]
        return CliRunner().invoke(
            train, words, catch_exceptions=False, standalone_mode=False
        ).stdout  # fmt: skip

    said = output("--ranks", "2", "--set", "run.cluster=cpu-avx2")
    chosen = re.search(r"layout auto on \S+: (t=\d,p=\d,d=\d,v=\d,b=\d+), ", said)
    assert chosen and f"layout      {chosen[1]}, " in said and snapshot(corpus) == before
    with pytest.raises(InputError, match=r"needs run\.cluster: .*ptdmpi probe"):
        output("--ranks", "2")
    with pytest.raises(InputError, match="--layout auto chooses parallel"):
        output("--set", "parallel.tensor=2")


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all texts, numbers and truth values of a forecast."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from _leaves(inner, (*path, key))
    elif value is not None:
        yield path


def _with_another(forecast: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """Return the forecast with another value at a path."""
    changed = copy.deepcopy(forecast)
    place = functools.reduce(lambda inner, key: inner[key], path[:-1], changed)
    value = place[path[-1]]
    match value:
        case bool():
            place[path[-1]] = not value
        case str():
            place[path[-1]] = f"other {value}"
        case _:
            place[path[-1]] = 3 * value + 10**9
    return changed


# Values of --json that the text does not show, each with the reason.
NOT_SHOWN = {
    "pipeline_rank": "which rank is the fullest is no news to a person",
    "fits": "shown as the mistake that ends the dry run",
    "free_bytes": "shown where it does not suffice",
    "step": "of the checkpoint: a part of what `says` says",
    "steps": "that are left: shown with the time of a step, where that is known",
    "is_exact": "a rank alone sends nothing",
}


def test_it_says_where_experts_are(corpus):
    """Two nodes of two ranks, with the two router groups on one node each."""
    changes = {
        "model.kind": "llama",
        "model.experts": 4,
        "model.experts_per_token": 1,
        "model.router_normalize": False,
        "model.router_groups": 2,
        "parallel.expert": 4,
        "parallel.data": 4,
    }
    forecast = preview(configured(corpus, changes), RankCount(4, "given", 2))
    first, second = forecast["experts"]
    assert first == (
        "1 of 4 on each of 4 ranks on 2 nodes; a token's experts are on at most 1 of them "
        "(router_top_groups = 1, and each router group is on one node)"
    )
    assert second.startswith("memory is predicted for 2 times the mean number of tokens")
    assert f"\nexperts     {first}\n            {second}\n" in as_text(forecast)
    assert preview(configured(corpus), ONE)["experts"] == []


def test_the_text_shows_all_that_is_known(corpus):
    """A new value of the forecast is shown, or named above."""
    asked = configured(corpus, {"checkpoint.every_steps": 2, "checkpoint.every_minutes": 3.0})
    forecast = preview(asked, ONE)
    text = as_text(forecast)
    hidden = {path for path in _leaves(forecast) if as_text(_with_another(forecast, path)) == text}
    assert {path[-1] for path in hidden} == NOT_SHOWN.keys(), hidden
