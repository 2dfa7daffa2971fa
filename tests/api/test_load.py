"""`ptdmpi.load` and `ptdmpi.open_shards`: what they return, and what they refuse."""

import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ptdmpi
from data_prep.vocabulary import BYTES_SHA256, train_bpe
from ptdmpi.base.plugins import name_of
from ptdmpi.config import InputError
from ptdmpi.data.shard_writer import ShardWriter
from tests._configs import layout
from tests._own import Counting, gained
from tests._stored import stored
from tests.api.test_own import made
from tests.parallel import parallel

VOCAB_SIZE = 257  # of the tokenizer of bytes
LAYOUTS = {1: [None], 2: [None, "t=2", "p=2"]}
LENGTH = 4
NOWHERE = "ptdmpi.open_shards('nowhere', 4)"


@pytest.fixture(autouse=True)
def usual_excepthook(monkeypatch):
    """Restore the excepthook after each test."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def shards(tmp_path):
    """A directory of two shards; the tokens 0 to 24 are in ascending order."""
    for number, (first, size) in enumerate(((0, 14), (14, 11))):
        path = tmp_path / f"shard-{number:05d}.h5"
        with ShardWriter(path, "t", "0" * 64, vocab_size=53, eod_id=52) as writer:
            writer.write(np.arange(first, first + size), np.array([size]))
    return tmp_path


def test_samples_of_shards_are_a_data_set_of_torch(shards):
    samples = ptdmpi.open_shards(shards, LENGTH)
    starts = [0, 4, 8, 14, 18]  # no sample crosses the border of the shards
    assert isinstance(samples, torch.utils.data.Dataset) and len(samples) == len(starts)
    for number, first in enumerate(starts):
        sample = samples[number]
        assert sample.keys() == {"input_ids", "labels"}
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
        assert sample["input_ids"].tolist() == list(range(first, first + LENGTH))
        assert sample["labels"].tolist() == list(range(first + 1, first + 1 + LENGTH))
    assert torch.equal(samples[-1]["labels"], samples[4]["labels"])
    assert torch.equal(samples[-5]["labels"], samples[0]["labels"])
    for number in (5, -6):
        with pytest.raises(IndexError, match=f"sample {number} of 5"):
            samples[number]
    for number in (1.5, "1", None, slice(2)):
        with pytest.raises(InputError, match=r"samples\[.+\]: legal: an integer from -5 to 4"):
            samples[number]
    assert torch.equal(samples[np.int64(4)]["labels"], samples[torch.tensor(-1)]["labels"])
    (batch,) = DataLoader(samples, batch_size=5)
    assert batch["labels"].shape == (5, LENGTH) and batch["input_ids"][:, 0].tolist() == starts


def test_a_folder_without_samples_is_refused(shards):
    folder = shards
    (folder / "empty").mkdir()
    for path, length, text in (
        (folder / "nowhere", LENGTH, "no such directory"),
        (folder / "empty", LENGTH, "empty"),
        (folder, 14, "14"),
        (folder, 0, "seq_length = 0; legal: an integer from 1"),
        (folder, -3, "seq_length = -3; legal: an integer from 1"),
        (folder, 4.0, r"seq_length = 4\.0; legal: an integer from 1"),
        (folder, "4", "seq_length = '4'; legal: an integer from 1"),
    ):
        with pytest.raises(InputError, match=text) as error:
            ptdmpi.open_shards(path, length)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [
        (
            "ptdmpi.open_shards('nowhere', 4)",
            2,
            "ptdmpi: error: dataset nowhere: no such directory",
        ),
        ("ptdmpi.plan('none', 'selene')", 2, "ptdmpi: error: "),
        (f"try: {NOWHERE}\nexcept ptdmpi.InputError: pass\n1 / 0", 1, "Traceback"),
        (
            f"sys.excepthook = lambda *given: print('mine', file=sys.stderr)\n{NOWHERE}",
            1,
            "mine",
        ),
    ],
)
def test_bad_input_ends_a_program_with_one_line(line, code, printed):
    """Without MPI, too. Other errors are printed as usual, and a program keeps its excepthook."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, ptdmpi\n{line}"], capture_output=True, text=True
    )
    assert done.returncode == code and done.stderr.startswith(printed)
    assert printed == "Traceback" or done.stderr.count("\n") == 1


@parallel(ranks=[1, 2])
def test_a_loaded_model_answers_alike_in_every_layout(comm, tmp_path):
    usual = sys.excepthook
    if comm.rank == 0:
        stored(tmp_path / "run", VOCAB_SIZE)
    comm.Barrier()
    ids = [97, 98, 99, 0, 256]
    seen = []
    for where in LAYOUTS[comm.size]:
        model = ptdmpi.load(tmp_path / "run", layout=where, tokenizer="bytes")
        assert model.encode("abc") == ids[:3] and model.decode(ids[:3]) == "abc"
        assert model.checkpoint.name == "step-00000007" and model.config.model.layers == 2
        options = {"max_new_tokens": 5, "temperature": 1.5}
        texts = model.generate(["ab", "c"], seed=3, **options)
        assert model.generate("ab", seed=3, **options) == texts[:1]
        assert model.generate(["ab", "c"], seed=4, **options) != texts
        values = model.log_probabilities(ids)
        assert len(values) == len(ids) - 1
        with pytest.raises(InputError, match="1 ids; legal: 2 to 17"):
            model.log_probabilities([1])
        with pytest.raises(InputError, match="18 ids; legal: 2 to 17"):
            model.log_probabilities([1] * 18)
        for prompt in (5, ["a", 5], b"a"):
            with pytest.raises(InputError, match=r"prompt is of the type .*; legal: a text, or"):
                model.generate(prompt)
        with pytest.raises(TypeError, match="beams"):
            model.generate("a", beams=2)
        seen.append((texts, values))
    for texts, values in seen:
        assert texts == seen[0][0] and values == pytest.approx(seen[0][1], rel=1e-5)
        assert comm.bcast((texts, values)) == (texts, values)
    if comm.size == 1:
        inner = model.model
        logits = inner.stages[0].head(inner.hidden(torch.tensor(ids[:-1])[:, None]))[:, 0]
        logs = logits[:, :VOCAB_SIZE].log_softmax(-1)
        assert values == pytest.approx(logs[range(4), ids[1:]].tolist(), rel=1e-5)
    with pytest.raises(InputError, match="nowhere"):
        ptdmpi.load(tmp_path / "nowhere")
    sys.excepthook = usual


@parallel(ranks=[2])
def test_a_sublayer_of_ones_own_goes_into_another_layout_and_is_loaded(comm, tmp_path):
    usual = sys.excepthook
    keys = {"model.sublayers": ["attention", name_of(gained), "mlp"], "run.steps": 4}
    if comm.rank == 0:
        (tmp_path / "train").mkdir()
        path = tmp_path / "train/shard-00000.h5"
        with ShardWriter(path, "bytes", BYTES_SHA256, vocab_size=VOCAB_SIZE, eod_id=256) as writer:
            writer.write(np.random.default_rng(1).integers(0, 256, 4000), np.array([4000]))
    whole = [step.result.loss for step in made(comm, tmp_path, keys | layout(t=2))]
    keys["run.dir"] = str(tmp_path / "moved")
    run = made(comm, tmp_path, keys | layout(t=2))
    for step in run:
        if step.number == 2:
            checkpoint = run.save()
            break
    assert "gained.core.weight" in (checkpoint / "manifest.json").read_text()
    rest = [step.result.loss for step in made(comm, tmp_path, keys | layout(p=2))]
    assert rest == pytest.approx(whole[2:], rel=1e-5)
    ids = [97, 98, 99, 0, 200]
    seen = []
    for where in LAYOUTS[2]:
        for folder in ("run", "moved"):
            model = ptdmpi.load(tmp_path / folder, layout=where, tokenizer="bytes")
            stages = torch.nn.ModuleList(model.model.stages.values())
            assert any("gained.core.weight" in name for name, _ in stages.named_parameters())
            seen.append(model.log_probabilities(ids))
            assert len(model.generate("ab", max_new_tokens=3)) == 1
    for values in seen:
        assert values == pytest.approx(seen[0], rel=1e-4)
    sys.excepthook = usual


@parallel(ranks=[1])
def test_a_model_of_ones_own_data_is_loaded_with_a_given_tokenizer(comm, tmp_path):
    usual = sys.excepthook
    folder, small = tmp_path / "hub", tmp_path / "small"
    for path, size in ((folder, 259), (small, VOCAB_SIZE)):
        path.mkdir()
        trained = train_bpe(["a b c " * 9], size)[0]
        (path / "tokenizer.json").write_text(trained)
    keys = {"run.steps": 1, "model.vocab_size": VOCAB_SIZE}
    for _ in made(comm, tmp_path, keys, data=Counting):
        pass
    run = tmp_path / "run"
    for tokenizer in ("bytes", str(small), str(small / "tokenizer.json")):
        model = ptdmpi.load(run, tokenizer=tokenizer)
        assert model.decode(model.encode("ab")) == "ab"
        assert len(model.generate("ab", max_new_tokens=3)) == 1
    for tokenizer, line in (
        (None, "trained on tests._own:Counting, which names no tokenizer file; give --tokenizer"),
        (str(folder), f"has 259 ids, the model has a vocabulary of {VOCAB_SIZE}; legal: a token"),
        (str(tmp_path / "run"), "tokenizer.json"),
    ):
        with pytest.raises(InputError, match=line) as error:
            ptdmpi.load(run, tokenizer=tokenizer)
        assert "\n" not in str(error.value)
    with patch("ptdmpi.inference.tokenizer.is_own", lambda path: False):  # its package is missing
        assert ptdmpi.load(run, tokenizer="bytes").encode("a") == [97]
    sys.excepthook = usual
