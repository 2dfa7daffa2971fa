"""The memory of `ptdmpi-data tokenize`: not that of the corpus, and for a long line little more."""

import json
import subprocess
import sys
import tracemalloc

import pytest

from data_prep.encode import EncodeOptions, Encoder
from data_prep.sources import find_sources, read_tasks

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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("txt", marks=pytest.mark.long)])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    line = json.dumps({"text": "some words " * 100}) + "\n"
    peaks = []
    for megabytes in (4, 32):
        corpus = tmp_path / f"{megabytes}.{kind}"
        corpus.write_text(line * (megabytes * 10**6 // len(line)))
        peaks.append(peak_kib(corpus, tmp_path / f"o{megabytes}"))
    assert peaks[1] < peaks[0] + 16 * 1024


@pytest.mark.cases(1)
@pytest.mark.parametrize("end", ["", "\N{SLIGHTLY SMILING FACE}", '"\n\\'])
def test_a_long_line_is_in_memory_once_and_its_ids_once(tmp_path, end):
    """One character outside of Latin-1 would make every other one take 4 bytes in a `str`."""
    text = "the words of a long line " * 400_000 + end
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    line_bytes = path.stat().st_size
    encoder = Encoder(EncodeOptions("bytes", "text", "strict", 0.0))
    (task,) = read_tasks(0, find_sources([path]), lambda size: None)
    tracemalloc.start()
    try:
        encoded = encoder(task)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes(encoded.tokens[:-1].astype("u1")).decode() == text
    # ids are of two bytes, in a buffer that grows; and of all else there are a few megabytes
    assert encoded.tokens.nbytes <= peak_bytes < 3 * line_bytes + 8e6
