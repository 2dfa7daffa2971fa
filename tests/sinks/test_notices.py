"""Messages about a run: what a web server and a mail server receive, and servers that fail."""

import http.server
import json
import smtplib
import socket
import threading
import time

import pytest

from ptdmpi.config import InputError
from ptdmpi.sinks import delivery
from ptdmpi.sinks.notices import Notices, require_receivers
from tests._configs import small

TOKEN = "T0secret"


@pytest.fixture
def server():
    """Return a web server; `server.got` are the JSON bodies that it has received."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append(json.loads(body))
            self.send_response(self.server.answer)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    made.got, made.answer = [], 200
    made.address = f"http://127.0.0.1:{made.server_port}/{TOKEN}"
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def messages(address: str, said: list[str]) -> Notices:
    config = small({"run.name": "first", "run.steps": 9, "log.notify": ["env:HOOK"]})
    return Notices(config.log, config.run, said.append, {"HOOK": address})


def test_a_message_has_the_name_the_step_and_the_loss(server):
    said: list[str] = []
    sent = messages(server.address, said)
    sent.send("begins", 0, None, "4 ranks")
    sent.send("stopped", 4, 2.5, "SIGUSR1")
    sent.close()
    first, last = server.got
    assert first["text"] == "first: begins at step 0 of 9: 4 ranks" and first["loss"] is None
    assert last["text"] == "first: stopped at step 4 of 9, loss 2.5000: SIGUSR1"
    assert (last["run"], last["event"], last["step"], last["loss"]) == ("first", "stopped", 4, 2.5)
    assert said == []


def test_a_server_that_refuses_is_warned_of_once_without_its_address(server):
    server.answer = 403
    said: list[str] = []
    sent = messages(server.address, said)
    sent.send("begins", 0)
    sent.send("done", 9)
    sent.close()
    assert said == ["warning: log.notify: env:HOOK: the server answers with code 403"]
    assert len(server.got) == 2  # the next message is tried again


def test_a_server_that_hangs_delays_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said: list[str] = []
        sent = messages(f"http://127.0.0.1:{silent.getsockname()[1]}/{TOKEN}", said)
        begin = time.monotonic()
        sent.send("failed", 3, 1.0)
        assert time.monotonic() - begin < 1.0
        sent.close(0.2)
        assert time.monotonic() - begin < 2.0


@pytest.mark.parametrize(
    "address", [f"http://127.0.0.1:x/{TOKEN}", "http://127.0.0.1:9/" + TOKEN, "http:///" + TOKEN]
)
def test_no_warning_contains_the_address(address):
    said: list[str] = []
    sent = messages(address, said)
    sent.send("begins", 0)
    sent.close()
    assert len(said) == 1 and TOKEN not in said[0]


def test_receivers_are_checked_without_printing_a_secret():
    for receivers in (f"https://hooks.slack.com/{TOKEN}", ["mailto:me@a.org", TOKEN], [""]):
        with pytest.raises(InputError) as error:
            small({"log.notify": receivers})
        assert "log.notify: receiver" in str(error.value) and TOKEN not in str(error.value)
    log = small({"log.notify": ["env:HOOK", "mailto:me@a.org"]}).log
    require_receivers(log, {"HOOK": "https://a.org/x"})
    with pytest.raises(InputError, match="HOOK is not set"):
        require_receivers(log, {})
    with pytest.raises(InputError, match="is not a web address") as error:
        require_receivers(log, {"HOOK": TOKEN})
    assert TOKEN not in str(error.value)


def test_mail(monkeypatch):
    """Send one mail through a stand-in for smtplib, with and without a password."""
    done: list[object] = []

    class Server:
        def __init__(self, host: str, port: int, **options: object) -> None:
            done.append((host, port))

        def __enter__(self) -> "Server":
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def starttls(self, **options: object) -> None:
            done.append("encrypted")

        def login(self, user: str, password: str) -> None:
            done.append((user, password))

        def send_message(self, message) -> None:
            done.append((message["To"], message["Subject"], "loss: 2.5" in message.get_content()))

    monkeypatch.setattr(smtplib, "SMTP", Server)
    delivery.mail("me@a.org", "", "first: done", {"loss": 2.5})
    delivery.mail("me@a.org", "smtp://me%40a.org:p%2F@b.org", "first: done", {"loss": 2.5})
    mail = ("me@a.org", "first: done", True)
    assert done[:2] == [("localhost", 25), mail]
    assert done[2:] == [("b.org", 587), "encrypted", ("me@a.org", "p/"), mail]
