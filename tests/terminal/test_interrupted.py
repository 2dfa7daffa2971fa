"""Ctrl-C in a long command: one line, exit code 130, no traceback."""

import signal
import sys
from types import SimpleNamespace

import pytest
import tomlkit

from ptdmpi.cli import main
from ptdmpi.comm.world import fail_together
from tests._configs import tree

SEARCH = ["plan", "--model", "l=2,h=64,a=2", "--cluster", "selene", "--ranks", "4", "--batch", "8"]


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        ("ptdmpi.plan.cost.price.Pricer.price", SEARCH),
        ("ptdmpi.commands.schedule.simulate", ["schedule", "-p", "2", "-m", "4"]),
        ("ptdmpi.preview.dry_run.preview", ["plan", "c.toml"]),
    ],
)
def test_ctrl_c_ends_at_once(tmp_path, monkeypatch, capsys, where, arguments):
    (tmp_path / "c.toml").write_text(tomlkit.dumps(tree({})))
    monkeypatch.chdir(tmp_path)
    # where the tests run in the background of a shell, SIGINT is ignored from the start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(where, lambda *rest: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "argv", ["ptdmpi", *arguments])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().err.split("\n")
    assert ended.value.code == 130 and "ptdmpi: interrupted" in said
    assert not any("Traceback" in line for line in said)


def test_ctrl_c_under_mpi_is_no_traceback(capsys):
    """One rank ends as without MPI; several end together, with the code of an interrupt."""
    codes = []
    world = SimpleNamespace(size=1, rank=0, control=SimpleNamespace(Abort=codes.append))
    with pytest.raises(KeyboardInterrupt), fail_together(world):
        raise KeyboardInterrupt
    assert codes == [] and capsys.readouterr().err == ""
    world.size = 2
    with fail_together(world):
        raise KeyboardInterrupt
    assert codes == [130] and capsys.readouterr().err == "ptdmpi: interrupted (rank 0)\n"
