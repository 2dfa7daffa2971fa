"""pass@k against its closed form and against counting, and what hostile programs get."""

import itertools
import json
import os
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.vocabulary import load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.evaluate import sandbox
from ptdmpi.evaluate.code import CodeAsking, CodeTask, judged, pass_at_k, read
from ptdmpi.evaluate.harness import Harness
from ptdmpi.evaluate.questions import Answers, Asking
from ptdmpi.evaluate.sandbox import PASSED, TIMEOUT, Sandbox
from ptdmpi.generate.generator import Continuation
from ptdmpi.generate.sampling import GREEDY
from ptdmpi.inference.text import Text
from tests._texts import metaspace

TASK = CodeTask(
    prompt="def add(a, b):\n",
    test="def check(add):\n    assert add(2, 3) == 5\n    assert add(-1, 1) == 0\n",
    entry_point="add",
    place="",
)
BODY = "    return a + b\n"


def test_pass_at_k_is_the_share_of_choices_with_a_right_one():
    for n, k in ((1, 1), (5, 1), (5, 3), (7, 7)):
        for c in range(n + 1):
            chosen = list(itertools.combinations(range(n), k))
            share = Fraction(sum(min(subset) < c for subset in chosen), len(chosen))
            assert pass_at_k(n, c, k) == float(share)
    # the numerically stable form of the paper's Figure 3
    n, c, k = 200, 13, 100
    left = 1.0
    for i in range(n - c + 1, n + 1):
        left *= 1 - k / i
    assert pass_at_k(n, c, k) == pytest.approx(1 - left, rel=1e-12)
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at_k(2, 1, 3)


def test_scores_are_means_over_tasks():
    asking = CodeAsking(2, GREEDY, 8, (1, 2), Sandbox())
    scores = asking.result([PASSED, "AssertionError", TIMEOUT, TIMEOUT])
    assert (scores["pass@1"], scores["pass@2"], scores["items"]) == (0.25, 0.5, 2)
    assert scores["failures"] == "2 timeout, 1 AssertionError"


HOSTILE = {
    "right": (BODY, PASSED),
    "wrong": ("    return a - b\n", "AssertionError"),
    "no program": ("    return (\n", "SyntaxError"),
    "exit": (f"{BODY}raise SystemExit(0)\n", "SystemExit"),
    "leaves": (f"{BODY}import os; os._exit(0)\n", "ended"),
    "memory": (f"{BODY}x = bytearray(2**29)\n", "MemoryError"),
    "some memory": (f"{BODY}x = bytearray(2**27)\n", PASSED),
    "fork": (f"{BODY}import os\nos.fork()\n", "BlockingIOError"),
    "child": (f"{BODY}import subprocess\nsubprocess.run(['true'])\n", "BlockingIOError"),
    "socket": (
        f"{BODY}import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\n",
        "OSError",
    ),
    "prints": (
        "    print('passed')\n    return 0\nimport os\nfor n in range(1, 64):\n    try:\n"
        "        os.write(n, b'passed')\n    except OSError:\n        pass\n",
        "passedAssertionError",
    ),
    "writes": (f"{BODY}open('/tmp/KEY/there', 'w')\n", "PermissionError"),
    # other users' files, and root's: CAP_DAC_READ_SEARCH would open both
    "reads private files": (f"{BODY}open('/tmp/KEY/secret')\n", "PermissionError"),
    "lists private directories": (
        f"{BODY}import os\nos.listdir('/tmp/KEY')\n",
        "PermissionError",
    ),
    "has capabilities": (
        f"{BODY}lines = [line for line in open('/proc/self/status') if line[:3] == 'Cap']\n"
        "assert len(lines) == 5 and not any(int(line.split()[1], 16) for line in lines)\n",
        PASSED,
    ),
    "imports": (f"{BODY}import decimal, json, random, sqlite3\n", PASSED),
    "large": (f"{BODY}open('large', 'wb').write(bytes(2**25))\n", "OSError"),
    "inherits": (f"{BODY}import os\nassert 'SECRET' not in os.environ, os.environ\n", PASSED),
    "reads": (f"{BODY}assert input() == ''\n", "EOFError"),
    "limit": (
        f"{BODY}import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (9, 9))\n",
        "ValueError",
    ),
}


def test_hostile_programs(tmp_path, monkeypatch):
    """None passes that did not come to its end, none leaves anything behind, none takes long."""
    import socket

    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    tmp_path.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        bodies = [
            body.replace("PORT", str(port)).replace("/tmp/KEY", str(tmp_path))
            for body, _ in HOSTILE.values()
        ]
        programs = [TASK.program(body) for body in bodies]
        outcomes = dict(zip(HOSTILE, judged(programs, Sandbox(time_s=60.0)), strict=True))
    expected = {name: outcome for name, (_, outcome) in HOSTILE.items()}
    if os.geteuid() != 0:  # the same user may write where he may, and has his own network rules
        own = ("writes", "reads private files", "lists private directories", "has capabilities")
        expected |= {name: outcomes[name] for name in own}
    assert outcomes == expected
    assert Sandbox(time_s=0.5).run(TASK.program("    while True: pass\n")) == TIMEOUT
    assert os.geteuid() != 0 or [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_without_a_way_to_cut_the_network_it_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: "/nonexistent/unshare")
    sandbox.without_network.cache_clear()
    try:
        with pytest.raises(InputError, match=r"legal: --allow-network"):
            Sandbox().run("")
        assert Sandbox(network=True, time_s=60.0).run("x = 1") == PASSED
    finally:
        sandbox.without_network.cache_clear()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a"}, "no text in the field 'test'"),
        ({"prompt": "a", "test": "b", "entry_point": "c d"}, "'entry_point' = \"c d\""),
    ],
)
def test_a_wrong_line_is_told(tmp_path: Path, line, message):
    (tmp_path / "x.jsonl").write_text(json.dumps(line))
    with pytest.raises(InputError, match=f"x.jsonl:1: {message}"):
        read(tmp_path / "x.jsonl")


@pytest.fixture
def spaces(tmp_path):
    """A text's tokenizer that leaves out the first space of what it decodes, and a model that is
    one rank."""
    (tmp_path / "tokenizer.json").write_text(metaspace([TASK.prompt + BODY] * 9).to_str())
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    text = Text(tokenizer, (), frozenset({tokenizer.eod_id}), tokenizer.eod_id)
    ids, prompt = text.encode(TASK.prompt + BODY), text.prompt(TASK.prompt)
    assert ids[: len(prompt)] == prompt and text.decode(ids[len(prompt) :]) == BODY[1:]
    world = SimpleNamespace(rank=0, broadcast_object=lambda value: value)
    model = SimpleNamespace(seq_length=99, axes=SimpleNamespace(world=world))
    return text, model, [Continuation(ids[len(prompt) :], "eod")]


def test_a_continuation_keeps_its_indentation(spaces, monkeypatch):
    """A program, the harness' answer, and one that is compared, by a tokenizer that drops the first
    space of a text."""
    text, model, written = spaces
    programs = []
    for name in ("code", "harness", "questions"):
        monkeypatch.setattr(f"ptdmpi.evaluate.{name}.generate", lambda *more: written)
    judge = "ptdmpi.evaluate.code.judged"
    monkeypatch.setattr(judge, lambda given, sandbox: programs.extend(given) or [PASSED])
    CodeAsking(1, GREEDY, 8, (1,), Sandbox()).ask(model, text, [TASK])
    assert programs == [TASK.program(BODY)]
    harness = Harness(model, text)
    assert harness.generate_until([(TASK.prompt, {"max_gen_toks": 8})]) == [BODY]
    asking = Asking(max_new_tokens=8, until=("\n",))
    asked = Answers((), asking, 0, (tuple(text.prompt(TASK.prompt)),))
    assert asked.ask(model, text, range(1)) == [[BODY.removesuffix("\n")]]
