"""`ptdmpi train` as its users start it: shards in, run directory out, stop and resume, mistakes."""

import json
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from ptdmpi.commands.report import command as report
from ptdmpi.data.order import Part, SampleOrder
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.report import read, summary
from tests._runs import log, loop, records, tensors
from tests.parallel import mpirun, parallel
from tests.sinks._events import curve

CONFIG = """
[run]
name = "t"
steps = 6
[model]
layers = 4
hidden = 32
heads = 4
seq_length = 16
dropout = 0.1
[batch]
global_size = 8
[optimizer]
learning_rate = 1e-3
[data]
valid = "valid"
[[data.train]]
path = "train"
[checkpoint]
every_steps = 3
[log]
validate_every_steps = 3
bigram_baseline = true
"""
INTERLEAVED = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual=2")


def _shard(folder: Path, tokens: int, seed: int, vocab_size: int = 53) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "shard-00000.h5"
    ids = np.random.default_rng(seed).integers(0, vocab_size - 1, tokens)
    with ShardWriter(path, "t", "0" * 64, vocab_size=vocab_size, eod_id=vocab_size - 1) as writer:
        writer.write(ids, np.array([tokens]))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    _shard(folder / "train", 4000, 1)
    _shard(folder / "valid", 500, 2)
    (folder / "config.toml").write_text(CONFIG)
    return folder


def _train(folder: Path, ranks: int, *settings: str, check: bool = True):
    options = [word for setting in settings for word in ("--set", setting)]
    return mpirun(
        ranks,
        ["-m", "ptdmpi", "train", "config.toml", *options],
        cwd=folder,
        check=check,
        timeout_s=100,
    )


@pytest.fixture(scope="module")
def interleaved(corpus) -> Path:
    """An undisturbed run of 6 steps in the layout of the demo."""
    curves = ["log.tensorboard=true"] if find_spec("tensorboardX") else []
    _train(corpus, 4, *INTERLEAVED, "run.name=straight", *curves)
    return corpus / "runs/straight"


def test_run_directory(interleaved):
    kept = records(interleaved)
    steps = [record for record in kept if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    wanted = "loss grad_norm learning_rate tokens step_time_s tokens_per_s mfu"
    for key in (*wanted.split(), "model_tflops_per_rank", "peak_memory_bytes", "rank_count"):
        assert all(key in record for record in steps), key
    assert steps[-1]["tokens"] == 6 * 8 * 16
    assert steps[-1]["layout"] == "t=2,p=2,d=1,v=2,b=1"
    validations = [record for record in kept if "validation_loss" in record]
    assert [record["step"] for record in validations] == [3, 6]
    assert ["bigram_validation_loss" in record for record in validations] == [True, False]
    saves = [record for record in kept if "checkpoint_stall_s" in record]
    assert [record["step"] for record in saves] == [3, 6]
    assert "stalled" in (interleaved / "log.txt").read_text()
    assert np.exp(validations[0]["validation_loss"]) == pytest.approx(
        validations[0]["validation_perplexity"]
    )
    assert (interleaved / "checkpoints/latest").read_text() == "step-00000006\n"
    assert len(list((interleaved / "timeline").iterdir())) == 1
    assert "step 6/6" in (interleaved / "log.txt").read_text()


def test_what_is_sent_is_recorded_and_reported(interleaved):
    """The bytes are of a step alone, whatever validations and saves send between."""
    steps = [record for record in records(interleaved) if "loss" in record]
    assert all(record["wire_bytes"] == steps[0]["wire_bytes"] for record in steps)
    assert steps[0]["wire_messages"]["pipeline"]["send"] == 3 * 8  # to three other stages
    wire = summary(read(interleaved))["wire"]
    assert wire.keys() == {"tensor", "pipeline", "ends"} == steps[0]["wire_bytes"].keys()
    for group, kinds in wire.items():
        for kind, numbers in kinds.items():
            assert numbers["bytes"] == numbers["closed_form_bytes"] > 0, (group, kind)


def test_tensorboard_has_the_records(interleaved):
    pytest.importorskip("tensorboardX")
    for key, name in (("loss", "train/loss"), ("validation_loss", "validation/validation_loss")):
        recorded = {r["step"]: r[key] for r in records(interleaved) if key in r}
        assert curve(interleaved / "tensorboard", name) == pytest.approx(recorded, rel=1e-6)


@parallel(ranks=[1])
def test_mixture_is_validated_per_dataset_and_what_was_drawn_is_told(comm, tmp_path):
    _shard(tmp_path / "more", 700, 3)
    _shard(tmp_path / "more-valid", 200, 4)
    parts = [
        {"path": str(tmp_path / name), "weight": weight}
        for name, weight in (("train", 0.7), ("more", 0.3))
    ]
    names = [str(tmp_path / name) for name in ("valid", "more-valid")]
    changes = {"data.train": parts, "data.valid": names, "log.validate_every_steps": 5}
    with loop(comm, tmp_path, {**changes, "run.steps": 5}) as made:
        made.run()
        seed = made.config.run.seed
    kept = records(tmp_path / "run")
    (validation,) = [record for record in kept if "validation_loss" in record]
    losses = validation["validation_losses"]
    assert list(losses) == names
    mean = (62 * losses[names[0]] + 12 * losses[names[1]]) / 74  # samples of 16 tokens
    assert validation["validation_loss"] == pytest.approx(mean, rel=1e-12)
    order = SampleOrder([Part(249, "0.7"), Part(43, "0.3")], seed=seed)
    steps = [record for record in kept if "loss" in record]
    for record in steps:
        drawn = np.bincount(order.locate(np.arange(8 * record["step"]))[0], minlength=2).tolist()
        assert record["samples_drawn"] == drawn
        assert record["epochs"] == [drawn[0] / 249, drawn[1] / 43]
    result = CliRunner().invoke(report, [str(tmp_path / "run")])
    words = " ".join(result.output.split())
    assert f"drawn of {tmp_path}/more 12 samples, 30.00%, 0.279 epochs" in words
    assert f"validation loss of {names[1]} {losses[names[1]]:.4f}" in words


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "bits"),
    [
        # bits in other layouts, without whole runs: tests/checkpoint/test_save.py
        pytest.param("same", 4, INTERLEAVED, True, marks=pytest.mark.long),
        pytest.param("serial", 1, (), False, marks=pytest.mark.long),
        ("data", 2, ("parallel.data=2",), False),
    ],
)
def test_resume_is_exact(corpus, interleaved, name, ranks, layout, bits):
    """3 steps in one layout, 3 more in this one: the parameters of 6 steps, optimizer state too."""
    first = corpus / f"runs/{name}/checkpoints/step-00000003"
    first.parent.mkdir(parents=True)
    # the undisturbed run's own checkpoint of step 3 is where this run begins
    first.symlink_to(interleaved / "checkpoints/step-00000003")
    output = _train(corpus, ranks, *layout, f"run.name={name}").stdout
    assert "resumed after step 3" in output
    straight = tensors(interleaved / "checkpoints/step-00000006")
    resumed = tensors(corpus / f"runs/{name}/checkpoints/step-00000006")
    assert straight.keys() == resumed.keys()
    for tensor, values in straight.items():
        if bits:
            np.testing.assert_array_equal(values, resumed[tensor], err_msg=tensor)
        elif "qkv.bias" not in tensor:  # its true gradient is zero for keys
            np.testing.assert_allclose(
                resumed[tensor], values, rtol=0, atol=1e-3 * np.abs(values).max(), err_msg=tensor
            )
    losses = {r["step"]: r["loss"] for r in records(interleaved) if "loss" in r}
    for record in records(corpus / f"runs/{name}"):
        if "loss" in record:
            assert record["loss"] == pytest.approx(losses[record["step"]], rel=1e-5)


@parallel(ranks=[1])
def test_damaged_checkpoint_is_stepped_over_and_records_are_dropped(comm, tmp_path):
    changes = {"run.steps": 6, "checkpoint.every_steps": 3}
    with loop(comm, tmp_path, changes) as made:
        made.run()
    run = tmp_path / "run"
    newest = next((run / "checkpoints/step-00000006").glob("rank-*"))
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    with loop(comm, tmp_path, {**changes, "run.steps": 4}) as made:
        made.run()
    said = log(run)
    assert "skipped checkpoint" in said and "is damaged" in said
    assert "resumed after step 3" in said
    kept = records(run)
    assert [r["step"] for r in kept if "loss" in r] == [1, 2, 3, 4]
    assert newest.exists()


STOP_ON_RANK_1 = """
import signal
from ptdmpi.cli import main
from ptdmpi.comm import launch
launch.prepare()
from ptdmpi.train.loop import Loop
train = Loop._step

def step_and_signal(self, step, feed):
    result = train(self, step, feed)
    if step == 1 and self.world.rank == 1:
        signal.raise_signal(signal.SIGUSR1)
    return result

Loop._step = step_and_signal
main()
"""


@pytest.mark.long
def test_a_signal_on_one_rank_stops_all_after_saving(corpus):
    """The command as a whole; in parts: tests/watch/test_requests.py."""
    settings = ["--set", "run.name=stopped", "--set", "parallel.pipeline=2"]
    command = ["-c", STOP_ON_RANK_1, "train", "config.toml", *settings]
    stopped = mpirun(2, command, cwd=corpus, check=False, timeout_s=100)
    assert stopped.returncode == 75, stopped.stderr
    assert "stopped on request" in stopped.stdout
    run = corpus / "runs/stopped"
    assert (run / "checkpoints/latest").read_text() == "step-00000002\n"
    again = _train(corpus, 2, "run.name=stopped", "parallel.pipeline=2").stdout
    assert "resumed after step 2" in again
    assert [r["step"] for r in records(run) if "loss" in r] == [1, 2, 3, 4, 5, 6]


MISTAKES = {
    "world": (["parallel.tensor=4"], "2 ranks cannot be split"),
    "batch": (["batch.global_size=9"], "not a multiple of data * micro_size"),
    "heads": (["parallel.tensor=2", "model.heads=1"], "does not divide model.heads"),
    "data": (['data.train=[{path="nowhere"}]'], "nowhere: no such directory"),
    "truncated": (['data.train=[{path="truncated"}]'], "truncated"),
    "tokenizer": (['data.tokenizer_sha256="1111"'], "tokenizer"),
    "short": (["model.seq_length=4096"], "one sequence"),
    "epochs": (['data.train=[{path="train", epochs=0.01}]'], "epochs"),
    "checkpoint": (["checkpoint.resume=nowhere"], "nowhere"),
    "ids": (['data.train=[{path="ids"}]', 'data.verify="off"'], "outside the vocabulary"),
}


# Commands one after the other in the same ranks; what rank R writes goes to NAME.R.
ONE_BY_ONE = """
import json, os, sys
from ptdmpi.cli import main
rank = os.environ["OMPI_COMM_WORLD_RANK"]
for name, words in json.loads(sys.argv[1]).items():
    os.dup2(os.open(f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print(f"exit code {end.code}", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def mistaken(corpus) -> dict[str, list[str]]:
    """The lines that `ptdmpi train` wrote to standard error on two ranks, by mistake."""
    path = _shard(corpus / "truncated", 4000, 1)
    path.write_bytes(path.read_bytes()[:3000])
    with h5py.File(_shard(corpus / "ids", 4000, 1), "r+") as file:
        file["tokens"][:] = 60
    commands = {}
    for name, (settings, _) in MISTAKES.items():
        options = [w for s in (*settings, f"run.name=bad-{name}") for w in ("--set", s)]
        commands[name] = ["train", "config.toml", *options]
    result = mpirun(2, ["-c", ONE_BY_ONE, json.dumps(commands)], cwd=corpus, check=False)
    outputs = {}
    for name in MISTAKES:
        texts = [(corpus / f"{name}.{rank}").read_text() for rank in range(2)]
        outputs[name] = [line for text in texts for line in text.splitlines()]
    # One rank meets the last mistake, and aborts all.
    outputs[name] += [f"exit code {result.returncode}"] * 2
    return outputs


@pytest.mark.cases(4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(corpus, mistaken, mistake):
    _, words = MISTAKES[mistake]
    lines = mistaken[mistake]
    assert lines.count("exit code 2") == 2, lines
    errors = [line for line in lines if line.startswith("ptdmpi: error: ")]
    assert len(errors) == 1 and words in errors[0], lines
    assert not (corpus / f"runs/bad-{mistake}/checkpoints").exists()
