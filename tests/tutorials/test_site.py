"""The documentation site, built and opened in headless Chromium."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.parallel import ROOT
from tests.report._browser import Browser, needs_chromium

pytestmark = [needs_chromium, pytest.mark.long]
FOUND = "[...document.querySelectorAll('.md-search-result__link')]"
# Maps words that readers type to the section of the site that must be among the first results.
SEARCHES = {
    "--tensor-model-parallel-size": "coming-from.html#megatron-lm",
    "tensor-model-parallel-size": "coming-from.html#megatron-lm",
    "--num-experts": "coming-from.html#megatron-lm",
    "train_micro_batch_size_per_gpu": "coming-from.html#gpt-neox",
    "batch_accumulation_per_replica": "coming-from.html#nanotron",
    "per_device_train_batch_size": "coming-from.html#hugging-faces-trainer",
    "micro_size": "configuration.html#batch",
    "--dry-run": "commands.html#ptdmpi-train",
    "zero bubble": "benchmarks.html#sharding-and-zero-bubbles",
}


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[str]:
    """Build the site, and serve it at the returned address."""
    pytest.importorskip("material", reason="no mkdocs-material (make docs installs it)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [*command, "--site-dir", str(folder)], cwd=ROOT, env=environment, check=True, timeout=300
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_names_are_found_as_they_are_written(site, tmp_path):
    with Browser(tmp_path) as browser:
        for words, section in SEARCHES.items():
            browser.open(f"{site}404.html")  # results of the search before must not count
            browser.open(f"{site}index.html")
            browser.until("document.querySelector('.md-search-result__meta') !== null")
            browser.run(
                "(() => { const box = document.querySelector('.md-search__input'); box.focus();"
                f" box.value = {json.dumps(words)}; box.dispatchEvent(new Event('keyup')); }})()"
            )
            browser.until(
                "/document/.test(document.querySelector('.md-search-result__meta').textContent)"
            )
            hits = browser.run(f"{FOUND}.slice(0, 12).map((link) => link.pathname + link.hash)")
            assert any(hit.endswith(section) for hit in hits), (words, hits)


@pytest.mark.parametrize("page", ["index", "tutorials/coming-from"])
def test_a_phone_shows_tables_in_its_width(site, tmp_path, page):
    with Browser(tmp_path, width=500) as browser:
        browser.open(f"{site}{page}.html")
        cells = "[...document.querySelectorAll('article td')]"
        outside = f"{cells}.filter((td) => td.getBoundingClientRect().right > innerWidth).length"
        assert browser.run(outside) == 0


def test_a_phone_shows_rows_of_the_configuration_in_its_height(site, tmp_path):
    with Browser(tmp_path, width=500) as browser:
        browser.open(f"{site}reference/configuration.html")
        rows = "[...document.querySelectorAll('article tr')]"
        assert browser.run(f"Math.max(...{rows}.map((row) => row.offsetHeight))") < 900


def test_a_phone_shows_messages_in_its_width(site, tmp_path):
    with Browser(tmp_path, width=500) as browser:
        browser.open(f"{site}how-to/troubleshooting.html")
        blocks = "[...document.querySelectorAll('article pre code')]"
        assert browser.run(f"{blocks}.length") > 10
        cut = f"{blocks}.filter((code) => code.scrollWidth > code.clientWidth).length"
        assert browser.run(cut) == 0
