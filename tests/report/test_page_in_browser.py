"""The page of a run in headless Chromium: no errors, values under the pointer, a zoomed axis, texts
that stay texts, and a run that is followed."""

import contextlib
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptdmpi import report
from ptdmpi.config import to_toml
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Costs, simulate
from ptdmpi.report import page
from tests._configs import small
from tests.report._browser import LIMIT_S, Browser, needs_chromium
from tests.report._made import append, made, record

pytestmark = needs_chromium

EVIL = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
)
PLOT = "document.querySelector('[data-key={}] .plot')"


def _loss(step: int) -> float:
    return 5.0 + math.cos(step / 20) - step / 200


def _run(path: Path) -> Path:
    steps = [
        record(
            step, 5.0 + math.cos(step / 20) - step / 200, fullest_expert=[0.5, 0.25 + step / 1e3]
        )
        for step in range(1, 301)
    ]
    steps[-1]["expert_tokens"] = [[30, 10, 0, 0], [10, 10, 10, 10]]
    validations = [
        {"step": step, "validation_loss": 5.5 - step / 200, "validation_perplexity": 9.0, EVIL: 1}
        for step in (100, 200, 300)
    ]
    run = made(path, 300, *steps, *validations)
    changes = {"parallel.pipeline": 2, "batch.micro_size": 2, "run.steps": 300}
    config = small({**changes, "run.name": path.name}, 2)
    (run / "config.toml").write_text(to_toml(config))
    (run / "timeline").mkdir()
    timeline = simulate(build("1f1b", 2, 1, 4), Costs(0.01, 0.02))
    (run / "timeline/step-00000290.json").write_text(timeline.to_json())
    (run / "log.txt").write_text(f"warning: {EVIL}\n")
    return run


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def _middle(browser: Browser, key: str) -> tuple[float, float, float]:
    """Return left edge, width and middle height of a plot, scrolled into the window."""
    browser.run(f"{PLOT.format(key)}.scrollIntoView({{block: 'center'}})")
    browser.drawn()
    box = browser.run(f"{PLOT.format(key)}.getBoundingClientRect().toJSON()")
    return box["left"], box["width"], box["top"] + box["height"] / 2


def _axis(browser: Browser, key: str) -> list[float]:
    return browser.run(f"[+{PLOT.format(key)}.dataset.low, +{PLOT.format(key)}.dataset.high]")


def _tip(browser: Browser) -> str:
    return browser.run(
        "document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent"
    )


def test_hover_shows_values_and_drag_changes_the_axis(browser, tmp_path):
    run = _run(tmp_path / "run")
    page.write(report.read(run), None, run / "report.html")
    browser.open((run / "report.html").as_uri())
    assert browser.run("document.title") == "run"  # no text of the run became a script
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert "onerror" in browser.run("document.querySelector('.warnings').textContent")
    titles = browser.run("[...document.querySelectorAll('.chart')].map((one) => one.dataset.key)")
    wanted = ["loss", "learning_rate", "grad_norm", "tokens_per_s", "step_time_s", "mfu"]
    more = ["fullest_expert", "expert_tokens", "timeline", "timeline"]
    assert titles == [*wanted, "peak_memory_bytes", *more]

    left, width, height = _middle(browser, "loss")
    browser.mouse("mouseMoved", left + width / 2, height)
    shown = _tip(browser).splitlines()
    step = int(shown[0].removeprefix("step "))
    assert 140 < step < 160
    assert float(shown[1].removeprefix("training: ")) == pytest.approx(_loss(step), rel=1e-4)

    assert _axis(browser, "loss") == [1, 300]
    browser.mouse("mousePressed", left + width / 2, height)
    browser.mouse("mouseMoved", left + width * 0.7, height)
    browser.mouse("mouseReleased", left + width * 0.7, height)
    low, high = _axis(browser, "loss")
    assert 130 < low < 160 < 190 < high < 230
    assert _axis(browser, "grad_norm") == [low, high]  # all curves show the same steps
    browser.run("document.querySelector('button[data-axis=steps]').click()")
    assert _axis(browser, "loss") == [1, 300]

    left, width, height = _middle(browser, "expert_tokens")
    browser.mouse("mouseMoved", left + 100, height - 12)  # the first of two layers and four experts
    name, load = _tip(browser).splitlines()
    assert (
        name.endswith("0, expert 0") and load == "3 of the mean load, 75.0% of the layer's tokens"
    )
    fills = browser.run(
        "[...document.querySelectorAll('[data-key=expert_tokens] .plot .low')].length"
    )
    assert fills == 2  # two experts have no token

    left, width, height = _middle(browser, "timeline")
    browser.mouse("mouseMoved", left + 70, height - 6)  # the middle is between two ranks
    assert "rank 1" in _tip(browser) or "rank 0" in _tip(browser)
    assert browser.problems == []
    assert all(address.startswith(("file:", "data:")) for address in browser.asked)


@pytest.mark.long
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_window(browser, tmp_path, width):
    run = _run(tmp_path / "a-long-name-of-a-run-without-any-blank-that-would-not-fit-on-a-phone")
    page.write(report.read(run), None, run / "report.html")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.call("Emulation.setDeviceMetricsOverride", **metrics)
    browser.open((run / "report.html").as_uri())
    root = "document.documentElement"
    assert browser.run(f"{root}.scrollWidth - {root}.clientWidth") == 0
    plots = browser.run("[...document.querySelectorAll('.plot')].map((one) => one.clientWidth)")
    assert min(plots) > 0.8 * width / (1 if width < 600 else 3)
    assert browser.problems == []


@contextlib.contextmanager
def _served(run: Path) -> Iterator[str]:
    """Run `ptdmpi watch --web`, and yield the address that it prints. Ctrl-C ends it with 0."""
    command = [sys.executable, "-m", "ptdmpi", "watch", str(run), "--web", "--every", "0.2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            line = server.stdout.readline()
            yield next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=LIMIT_S)
            assert (server.returncode, errors) == (0, "")
        finally:
            server.kill()


@pytest.mark.long
def test_the_served_page_follows_the_run(browser, tmp_path):
    run = made(tmp_path / "run", 10, record(1, 4.0), record(2, 3.0))
    with _served(run) as address:
        browser.open(address)
        assert _axis(browser, "loss") == [1, 2]
        append(run, record(3, 2.5))
        browser.until(f"{PLOT.format('loss')}.dataset.high === '3'")
        assert "3 of 10" in browser.run("document.querySelector('.tiles').textContent")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": EVIL, "loss": EVIL}) + "\n{[\n")
        append(run, record(4, 2.0))
        browser.until(f"{PLOT.format('loss')}.dataset.high === '4'")
        assert browser.problems == []
        assert all(asked.startswith((address, "data:")) for asked in browser.asked)
