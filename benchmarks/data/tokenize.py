"""The speed of tokenizing: ptdmpi's tool, direct calls of the tokenizer, and tools of other
projects.

The module makes the two comparisons listed below. Both use a text that every machine has (the
sources of Python's standard library), and a BPE tokenizer that is trained on a part of this text:

- in one process, after a warm-up: `ptdmpi-data tokenize` is compared with direct calls of
`encode_batch` and `encode_batch_fast` on texts in memory.
- on all cores: the complete commands of the tools are compared. A rate is computed from two corpora
  of different length: the difference in tokens, divided by the difference in time. The start-up
  time (imports, the tokenizer's file, processes) cancels in the difference. The table has a
  separate column for the total time. Fast tools also tokenize a longer corpus, because their times
  for the two corpora differ too little. Direct calls run in one process per core, and each process
  tokenizes a separate file of the corpus.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.launch import ROOT
from benchmarks.turns import Side, compare, show

VOCABULARY_SIZE = 32768
LEARN_BYTES = 4_000_000
WARM_BYTES = 4_000_000
LONG_BYTES = 12_000_000
SHORT_SHARE = 4  # The short corpus is a quarter of the long corpus.
LONGEST_TIMES = 10  # The longest corpus is the long corpus repeated this many times.
OURS = "ptdmpi-data tokenize"
GROUP_TEXTS = 256  # number of texts in a direct call


@dataclass(frozen=True)
class Peers:
    """The tools of other projects that are compared. If a package that a tool needs is missing, the
    tool is skipped, and a line says so."""

    # a Python interpreter that has datatrove, gigatoken, or the packages that Megatron needs
    python: Path | None
    megatron: Path | None  # a checkout of Megatron-LM


def stdlib_texts(size_bytes: int) -> list[str]:
    """Return the texts of Python's own source files, about `size_bytes` bytes in total. The texts
    are repeated if the sources have fewer bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = []
    total = 0
    for path in paths:
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # skip sources that test other encodings
        if not text:
            continue  # skip empty documents, which tools treat differently
        texts.append(text)
        total += len(text.encode())
        if total >= size_bytes:
            return texts
    return texts * (size_bytes // total) + texts[: len(texts) * (size_bytes % total) // total]


def write_corpus(folder: Path, texts: list[str], files: int) -> Path:
    """Write the texts as `files` `.jsonl` files into a folder, and as a single FOLDER.jsonl. Return
    the folder."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    for number in range(files):
        (folder / f"{number}.jsonl").write_text("".join(lines[number::files]))
    folder.with_name(f"{folder.name}.jsonl").write_text("".join(lines))
    return folder


def learn(folder: Path) -> Path:
    """Train a tokenizer on a part of the corpus. Return the path of the tokenizer's file."""
    from data_prep.vocabulary import train_bpe

    path = folder / "tokenizer.json"
    path.write_text(train_bpe(stdlib_texts(LEARN_BYTES), VOCABULARY_SIZE)[0])
    return path


def warm(folder: Path, tokenizer: Path, rounds: int) -> None:
    """Measure `ptdmpi-data tokenize` and direct calls of the tokenizer in one process on one core,
    after a warm-up, and print a table."""
    import tokenizers

    from data_prep.corpus import OutputOptions, make_shards
    from data_prep.encode import EncodeOptions
    from data_prep.launch import Team
    from data_prep.text_corpus import TextCorpus, TextOptions

    texts = stdlib_texts(WARM_BYTES)
    corpus = write_corpus(folder / "warm", texts, 1)
    bare = tokenizers.Tokenizer.from_file(str(tokenizer))
    bare.encode_special_tokens = True
    groups = [texts[n : n + GROUP_TEXTS] for n in range(0, len(texts), GROUP_TEXTS)]
    tokens = sum(
        len(encoded.ids) + 1 for group in groups for encoded in bare.encode_batch_fast(group)
    )

    def calls(encode: Callable) -> Side:
        def side() -> float:
            begun = time.perf_counter()
            for group in groups:
                encode(group, add_special_tokens=False)
            return tokens / (time.perf_counter() - begun)

        return side

    def ours() -> float:
        output = OutputOptions(folder / "warm-shards", force=True)
        encode = EncodeOptions(str(tokenizer), "text", "strict", 0.0)
        options = TextOptions((str(corpus),), encode, workers=1)
        begun = time.perf_counter()
        ranks = Team(0, 1, lambda value: [value])
        table = make_shards(lambda: TextCorpus(options, output), output, ranks)
        elapsed = time.perf_counter() - begun
        assert table["train_tokens"] == tokens
        return tokens / elapsed

    sides = {
        "bare encode_batch_fast": calls(bare.encode_batch_fast),
        "bare encode_batch": calls(bare.encode_batch),
        "ptdmpi-data tokenize --workers 1": ours,
    }
    table = compare(sides, "bare encode_batch_fast", rounds)
    title = f"tokenize, warm, one core: {len(texts):,} documents, {tokens:,} tokens"
    show(f"{title}, a vocabulary of {VOCABULARY_SIZE:,}", "tokens/s", table)


BARE = """
import json, sys
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
encode = getattr(tokenizer, sys.argv[3])
for n in range(0, len(texts), 256):
    encode(texts[n : n + 256], add_special_tokens=False)
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    tokenizer, corpus, output, tasks = sys.argv[1:]
    steps = [
        JsonlReader(corpus),
        DocumentTokenizer(
            output,
            tokenizer_name_or_path=tokenizer,
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        ),
    ]
    LocalPipelineExecutor(steps, tasks=int(tasks), workers=int(tasks), logging_dir=output).run()
"""


@dataclass(frozen=True)
class Tool:
    """A command that tokenizes a corpus. `words` is a function that returns the command line for a
    corpus, an output folder and a number of cores. `written` is a pattern of names of output files,
    in which each token has 2 bytes. `written` is None if the tool writes no such files."""

    words: Callable[[Path, Path, int], list[str]]
    written: str | None = None
    # True if the tool runs once per core, each time with a separate file of the corpus
    shares: bool = False
    quick: bool = False  # True if the tool also gets the longest corpus


def _tools(folder: Path, tokenizer: Path, peers: Peers) -> dict[str, Tool]:
    """Return the tools that are available on this machine (with the packages in `peers`), by their
    names in the table."""
    here = sys.executable
    there = str(peers.python)
    model = folder / "hf-tokenizer"  # a folder in the format of transformers
    model.mkdir()
    shutil.copy(tokenizer, model / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    # this program is in a separate file, because datatrove's processes import the file
    script = folder / "run_datatrove.py"
    script.write_text(DATATROVE)

    def bare(name: str) -> Tool:
        return Tool(lambda corpus, out, n: [here, "-c", BARE, str(tokenizer), str(corpus), name])

    def ours(python: str, prefix: str) -> Tool:
        def words(corpus: Path, out: Path, cores: int) -> list[str]:
            words = [python, "-m", "data_prep.cli", "tokenize", str(corpus), "--output", str(out)]
            options = ["--tokenizer", f"{prefix}{tokenizer}", "--workers", str(cores), "--quiet"]
            return words + options

        return Tool(words, quick=bool(prefix))

    def datatrove(corpus: Path, out: Path, cores: int) -> list[str]:
        return [there, str(script), str(tokenizer), str(corpus), str(out), str(cores)]

    def megatron(name: str, *options: str) -> Tool:
        def words(corpus: Path, out: Path, cores: int) -> list[str]:
            out.mkdir()
            words = [there, str(peers.megatron / "tools" / name), "--output-prefix", f"{out}/x"]
            words += ["--input", f"{corpus}.jsonl", "--tokenizer-type", "HuggingFaceTokenizer"]
            words += ["--tokenizer-model", str(model), "--append-eod", *options]
            return [*words, "--workers", str(cores)] if "--use-gigatoken" not in options else words

        return Tool(words, "*.bin", quick="--use-gigatoken" in options)

    tools = {
        "bare encode_batch_fast": replace(bare("encode_batch_fast"), shares=True),
        "bare encode_batch": replace(bare("encode_batch"), shares=True),
        OURS: ours(here, ""),
    }
    if peers.python is not None:
        tools["ptdmpi-data tokenize, gigatoken:"] = ours(there, "gigatoken:")
        tools["datatrove's DocumentTokenizer"] = Tool(datatrove, "*.ds")
    if peers.python is not None and peers.megatron is not None:
        tools["Megatron's preprocess_data.py"] = megatron("preprocess_data.py")
        tools["Megatron's preprocess_data_fast.py"] = megatron(
            "preprocess_data_fast.py", "--use-gigatoken"
        )
    return tools


def _run(tool: Tool, corpus: Path, out: Path, cores: int) -> tuple[float, int | None]:
    """Run a tool on a corpus with `cores` cores. Return the seconds that the tool took and the
    number of tokens that it wrote into the folder `out`. The number is None if the tool has no
    output files with 2 bytes per token. Raises RuntimeError with the tool's last line if the tool
    fails."""
    shutil.rmtree(out, ignore_errors=True)
    environ = {name: value for name, value in os.environ.items() if "TOKENIZERS" not in name}
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
    inputs = sorted(corpus.iterdir()) if tool.shares else [corpus]
    begun = time.perf_counter()
    runs = [
        subprocess.Popen(
            tool.words(text, out, cores),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        for text in inputs
    ]
    printed = [run.communicate(timeout=600)[0] for run in runs]
    seconds = time.perf_counter() - begun
    if any(run.returncode for run in runs):
        lines = [line for line in "".join(printed).splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else "it printed nothing")
    if tool.written is None:
        return seconds, None
    return seconds, sum(path.stat().st_size for path in out.rglob(tool.written)) // 2


def commands(folder: Path, tokenizer: Path, rounds: int, peers: Peers) -> None:
    """Measure the complete commands of all tools on all cores, and print a table. Ratios are
    relative to the first tool."""
    cores = len(os.sched_getaffinity(0))
    texts = stdlib_texts(LONG_BYTES)
    sizes = (texts[::SHORT_SHARE], texts, texts * LONGEST_TIMES)
    corpora = [write_corpus(folder / f"corpus{n}", part, cores) for n, part in enumerate(sizes)]
    tools = _tools(folder, tokenizer, peers)
    wrong: dict[str, str] = {}
    table = folder / "tokens"
    words = [sys.executable, "-m", "data_prep.cli", "inspect", "--json", str(table)]
    tokens = []
    for corpus in corpora[:2]:
        _run(tools[OURS], corpus, table, cores)
        tokens.append(json.loads(subprocess.check_output(words))["tokens"])
    tokens.append(LONGEST_TIMES * tokens[1])
    seconds: dict[str, list[list[float]]] = {name: [] for name in tools}
    for number in range(rounds + 1):  # an additional first round is a warm-up
        for name in list(seconds)[:: 1 if number % 2 else -1]:
            mine = corpora if tools[name].quick else corpora[:2]
            try:
                runs = [_run(tools[name], corpus, folder / "out", cores) for corpus in mine]
            except (OSError, RuntimeError) as error:
                wrong[name] = str(error)
                del seconds[name]
                continue
            if number:
                seconds[name].append([taken for taken, _ in runs])
            elif any(
                have not in (None, want) for (_, have), want in zip(runs, tokens, strict=False)
            ):
                wrong[name] = f"(wrote {runs[1][1]:,} tokens, not {tokens[1]:,})"
    _show(seconds, tokens, f"{cores} core(s), {len(texts):,} documents")
    for name, reason in wrong.items():
        print(f"  {name:<42} {reason[:100]}")
    if peers.python is None or peers.megatron is None:
        print("  (other tools: --peers PYTHON, for Megatron's also --megatron DIR)")


def rates_between(seconds: list[list[float]], tokens: list[int]) -> list[float] | None:
    """Return the tokens per second of a tool in each round, from the difference between the tool's
    shortest and longest corpus. `seconds` has a list for each round, with the time of each corpus,
    and `tokens` has the number of tokens of each corpus. Both begin with the shortest corpus.
    Return None if the smallest difference in time between the two corpora is not greater than the
    variation of this difference between rounds."""
    longest = len(seconds[0]) - 1
    differences = [times[longest] - times[0] for times in seconds]
    if min(differences) <= max(differences) - min(differences):
        return None
    return [(tokens[longest] - tokens[0]) / difference for difference in differences]


def _show(seconds: dict[str, list[list[float]]], tokens: list[int], what: str) -> None:
    """Print a table of the tools: tokens per second, the ratio to the first tool in the same round,
    and the seconds of a complete command. `seconds` and `tokens` are for several corpora, the
    shortest first (see `rates_between`). `what` is the part of the title with the numbers of cores
    and documents. A dash means that `rates_between` returned no rate, for this tool or for the
    first tool."""
    rates = {name: rates_between(times, tokens) for name, times in seconds.items()}
    plain = next(iter(rates.values()))
    print(f"\ntokenize, whole commands on {what}, {tokens[1]:,} tokens")
    print(f"  {'':<42} {'tokens/s':>12} {'ratio':>20} {'whole command':>14}")
    for name, mine in rates.items():
        rate = "-"
        spread = "-"
        if mine is not None:
            rate = f"{statistics.median(mine):,.0f}"
        if mine is not None and plain is not None:
            ratios = [a / b for a, b in zip(mine, plain, strict=True)]
            spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        whole = statistics.median(times[1] for times in seconds[name])
        print(f"  {name:<42} {rate:>12} {spread:>20} {whole:>12.1f} s")
