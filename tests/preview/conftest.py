"""What the tests of this folder share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Make shards of text in bytes: data/train and data/valid."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [json.dumps({"text": f"{number}: {WORDS * 4}"}) for number in range(200)]
    (folder / "text.jsonl").write_text("\n".join(texts))
    where = ["--output", folder / "data/train", "--valid-output", folder / "data/valid"]
    words = ["tokenize", folder / "text.jsonl", "--tokenizer", "bytes", *where]
    code = "import sys; from data_prep.cli import main; main()"
    options = ["--valid-fraction", "0.1"]
    subprocess.run([sys.executable, "-c", code, *map(str, words), *options], check=True, timeout=60)
    return folder
