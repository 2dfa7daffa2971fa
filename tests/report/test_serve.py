"""`ptdmpi watch --web`: a server on this host, whose page follows a run."""

import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from click.testing import CliRunner

from ptdmpi.commands.watch import command
from ptdmpi.config import InputError
from ptdmpi.report.page.serve import Followed, PageServer
from tests.report._made import append, made, record


@contextlib.contextmanager
def _server(run: Path) -> Iterator[PageServer]:
    with PageServer(Followed(run), 0, 2.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _get(server: PageServer, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_and_its_news(tmp_path):
    run = made(tmp_path / "run", 3)
    with _server(run) as server:
        status, text = _get(server, server.root)
        assert status == 200 and '"every_s":2.0' in text and "connect-src 'self'" in text
        news = json.loads(_get(server, f"{server.root}news")[1])
        assert news["head"]["state"] == "starting" and news["content"]["charts"] == []
        append(run, record(1, 4.0))
        server.followed._rest_until = 0.0
        later = json.loads(_get(server, f"{server.root}news?known={news['version']}")[1])
        assert later["content"]["charts"][0]["series"][0]["y"] == [4.0]
        same = json.loads(_get(server, f"{server.root}news?known={later['version']}")[1])
        assert same["content"] is None and same["version"] == later["version"]
        for known in ("x", "-1", "9" * 5000, "1.5", ""):
            assert _get(server, f"{server.root}news?known={known}")[0] == 200


def test_nothing_but_the_page_is_served_and_only_to_this_host(tmp_path):
    run = made(tmp_path / "run", 3, record(1, 4.0))
    with _server(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        root = server.root
        for path in ("/", f"{root}config.toml", f"{root}../run/config.toml", "/etc/passwd", "//"):
            assert _get(server, path)[0] == 404, path
        # another site's name for this host
        assert _get(server, root, Host=f"evil.example:{server.server_port}")[0] == 403
        assert _get(server, root, Host="localhost:9000")[0] == 200  # through a tunnel
        assert urlsplit(server.address).path == root and len(root) > 20


def test_damage_is_named_and_the_page_stays(tmp_path):
    run = made(tmp_path / "run", 3, record(1, 4.0))
    followed = Followed(run)
    assert followed.news()["head"]["warnings"] == []
    (run / "timeline").mkdir()
    (run / "timeline/step-00000001.json").write_text("{}")
    followed._rest_until = 0.0
    news = followed.news()
    (warning,) = news["head"]["warnings"]
    assert "this is not a timeline" in warning and news["content"]["charts"]
    (run / "timeline/step-00000001.json").unlink()
    (run / "config.toml").write_text("[run\n")
    followed._rest_until = 0.0
    assert "cannot be shown" in followed.news()["head"]["warnings"][0]


def test_records_that_a_new_start_drops_are_dropped(tmp_path):
    run = made(tmp_path / "run", 10, record(1, 4.0), record(2, 3.0))
    followed = Followed(run)
    followed.news()
    (run / "new").write_text(json.dumps(record(1, 9.0)) + "\n")
    os.replace(run / "new", run / "metrics.jsonl")
    followed._rest_until = 0.0
    (loss,) = followed.news()["content"]["charts"][0]["series"]
    assert loss["y"] == [9.0]


def test_mistakes_are_one_line(tmp_path):
    run = str(made(tmp_path / "run", 3, record(1, 4.0)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            "in use": [run, "--web", "--port", port],
            "one run": [run, run, "--web"],
            "--json": [run, "--web", "--json"],
            "needs --web": [run, "--port", "8000"],
            "is not a run directory": [str(tmp_path), "--web"],
        }
        for words, arguments in wrong.items():
            done = CliRunner().invoke(command, arguments)
            assert isinstance(done.exception, InputError), (words, done.output)
            assert words in str(done.exception) and "\n" not in str(done.exception)
