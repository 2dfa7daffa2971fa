"""The memory of `ptdmpi-data tokenize` does not depend on the size of the corpus."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "data_prep.cli"]


def peak_kib(corpus, output):
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=-3); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [
        *COMMAND,
        "tokenize",
        corpus,
        "--output",
        output,
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
        "--shard-tokens",
        "2000000",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, command)], capture_output=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    line = json.dumps({"text": "some words " * 100}) + "\n"
    peaks = []
    for megabytes in (4, 32):
        corpus = tmp_path / f"{megabytes}.{kind}"
        corpus.write_text(line * (megabytes * 10**6 // len(line)))
        peaks.append(peak_kib(corpus, tmp_path / f"o{megabytes}"))
    assert peaks[1] < peaks[0] + 16 * 1024
