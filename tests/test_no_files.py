"""Pipes, sockets, devices and directories in place of files: each command ends with one line."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ptdmpi import cli
from ptdmpi.data.shard_writer import ShardWriter
from tests import _stored

LIMIT_S = 60.0
CONFIG = """
[run]
steps = 1
[model]
layers = 2
hidden = 8
heads = 2
seq_length = 8
[[data.train]]
path = "train"
"""
SITE = 'scheduler = "slurm"\naccount = ""\n[node]\nranks = 1\ncores = 1\n'
# Words of a command line; X is the path that is no file.
COMMANDS = (
    "train X --dry-run",
    "run -n 2 X",
    "plan X --cluster a100",
    "plan --model gpt2 --ranks 8 --cluster X",
    "ask ranks --model gpt2 --ranks 8 --tokens 1e9 --cluster X",
    "submit X --site site.toml",
    "submit config.toml --site X",
    "train config.toml --dry-run --set run.cluster=X",
    "train config.toml --dry-run --ranks 2 --set batch.global_size=2 "
    "--set data_parallel.method=decentralized --set data_parallel.topology=X",
    "generate model --prompts X",
    "evaluate model --tasks X",
    "evaluate model --code X",
)


class Hung(BaseException):
    """The command waits for a file; no handler of the program catches this."""


@pytest.fixture
def limit() -> Iterator[None]:
    """End the test if it takes longer than LIMIT_S."""

    def end(number, frame):
        raise Hung

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def make(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory"])
@pytest.mark.parametrize("words", COMMANDS)
def test_what_is_no_file_is_one_line(tmp_path, monkeypatch, capsys, limit, words, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    Path("config.toml").write_text(CONFIG)
    Path("site.toml").write_text(SITE)
    if "model" in words:
        _stored.stored(tmp_path / "model", 257)
    Path("train").mkdir()
    with ShardWriter(Path("train/a.h5"), "t", "0" * 64, vocab_size=9, eod_id=8) as writer:
        writer.write(np.arange(100) % 8, np.array([100]))
    make(kind, tmp_path / "x.toml")
    monkeypatch.setattr(sys, "argv", ["ptdmpi", *words.replace("X", "x.toml").split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    errors = [line for line in capsys.readouterr().err.splitlines() if "x.toml" in line]
    assert end.value.code == 2 and len(errors) == 1, errors
