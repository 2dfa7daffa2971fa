"""The same scores in every layout, equal to those of an independent forward pass."""

import json
import math

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from data_prep.vocabulary import BYTES_SHA256, ByteTokenizer
from ptdmpi.comm.world import World
from ptdmpi.commands.evaluate import _table, command
from ptdmpi.config import InputError
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.to_hf import to_hf
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate import scoring
from ptdmpi.evaluate.harness import Harness
from ptdmpi.evaluate.perplexity import perplexity, windows
from ptdmpi.evaluate.scoring import Request, score
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.text import Text
from tests import _stored
from tests._runs import loop
from tests.parallel import mpirun, parallel

V = 50
LAYOUTS = ["t=2", "p=2", "d=2"]
# (tokens, how many are given); all that does not fit 16 tokens loses its beginning
REQUESTS = [(5, 1), (16, 3), (17, 1), (30, 20), (2, 1), (9, 8), (9, 2)]


def shards(folder, vocab_size=V, tokenizer="t", lengths=(40, 17, 2)):
    folder.mkdir()
    for number, length in enumerate(lengths):
        ids = np.random.default_rng(number).integers(0, vocab_size - 1, length)
        with ShardWriter(
            folder / f"{number}.h5",
            tokenizer,
            BYTES_SHA256,
            vocab_size=vocab_size,
            eod_id=vocab_size - 1,
        ) as writer:
            writer.write(ids, np.array([length]))
    return folder


def requests():
    generator = np.random.default_rng(5)
    return [Request(generator.integers(0, V, n).tolist(), first) for n, first in REQUESTS]


def reference(folder, ids):
    """log softmax of the self-check's own forward pass: [tokens - 1] of ids[1:]."""
    values = load_file(folder / "model.safetensors")
    named = {key.removeprefix("model."): value.double() for key, value in values.items()}
    config = json.loads((folder / "config.json").read_text())
    ((logits,),) = FORWARD["llama"](config, named.__getitem__, Question(torch.tensor([ids[:-1]])))
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def expected_of(folder, data, wanted):
    """The log-likelihoods of the requests, and the negative one of the shards for each stride."""
    values = [
        float(reference(folder, request.ids[-17:])[request.first - len(request.ids) :].sum())
        for request in wanted
    ]
    totals = dict.fromkeys((16, 5), 0.0)
    for stride in totals:
        for shard, header in enumerate(Dataset(data).headers):
            tokens = np.random.default_rng(shard).integers(0, V - 1, header.tokens).tolist()
            for _, first, end, begin in windows(header.tokens, shard, 16, stride):
                totals[stride] -= float(reference(folder, tokens[first:end])[begin - end :].sum())
    return values, totals


@parallel(ranks=[2], limit_s=120)
def test_scores_are_those_of_the_reference_in_every_layout(comm, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    wanted, expected = requests(), None
    if comm.rank == 0:
        to_hf(_stored.stored(run, V, **_stored.LLAMA), tmp_path / "hf")
        expected = expected_of(tmp_path / "hf", shards(data), wanted)
    expected = comm.bcast(expected)
    for where in LAYOUTS:
        loaded, _ = open_inference(run, World(comm), where, None)
        scores = score(loaded, wanted)
        assert [answer.tokens for answer in scores] == [n - first for n, first in REQUESTS]
        for answer, value in zip(scores, expected[0], strict=True):
            assert answer.log_likelihood == pytest.approx(value, rel=1e-5)
        for stride, total in expected[1].items():
            answer = perplexity(loaded, Dataset(data), stride, words=10)
            assert answer["tokens"] == 39 + 16 + 1
            assert answer["nats_per_token"] == pytest.approx(total / 56, rel=1e-5)
            assert answer["perplexity"] == pytest.approx(math.exp(total / 56), rel=1e-4)
            assert answer["word_perplexity"] == pytest.approx(math.exp(total / 10), rel=1e-3)
        comm.Barrier()


@parallel(ranks=[2], limit_s=120)
def test_answers_of_conversations_are_scored_as_in_training(comm, tmp_path):
    """The validation loss of a training on the same shards, in another layout, with another number
    of tokens in a window, and with prompts that are not scored."""
    from data_prep.chat.pack import ChatOptions, make_chat_shards
    from data_prep.corpus import OutputOptions

    if comm.rank == 0:
        texts = [(f"{n} and {n * n}?", f"{n + n * n}, no more") for n in range(40)]
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in texts]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        options = ChatOptions((str(tmp_path / "a.jsonl"),), "bytes", 100)
        make_chat_shards(options, OutputOptions(tmp_path / "train"))
    comm.Barrier()
    changes = {
        "run.steps": 2,
        "model.seq_length": 100,
        "batch.global_size": 4,
        "parallel.data": 1,
        "parallel.tensor": 2,
        "data.document_boundaries": True,
        "data.valid": str(tmp_path / "train"),
    }
    with loop(comm, tmp_path, changes) as trained:
        trained.run()
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    (*_, expected) = (r["validation_loss"] for r in records if r.get("validation_loss"))
    dataset = Dataset(tmp_path / "train")
    opened, _ = open_inference(tmp_path / "run", World(comm), "d=2", None)
    for stride in (None, 7):
        scores = perplexity(opened, dataset, stride)
        assert scores["nats_per_token"] == pytest.approx(expected, rel=1e-5)
        assert scores["tokens"] == sum(int(dataset.weights(n).sum()) for n in range(1))
        assert scores["scored"] == "answers" and scores["tokens"] < dataset.token_count / 2
    with pytest.raises(InputError, match="of which only the answers are scored"):
        perplexity(opened, dataset, None, words=10)


def one_rank(tmp_path, vocab_size=257, **keys):
    run = _stored.stored(tmp_path / "run", vocab_size, **keys)
    return open_inference(run, World(), None, None)[0]


def test_batches_do_not_matter(tmp_path, monkeypatch):
    loaded = one_rank(tmp_path, V)
    together = score(loaded, requests())
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 1)
    apart = score(loaded, requests())
    for a, b in zip(together, apart, strict=True):
        assert a.log_likelihood == pytest.approx(b.log_likelihood, rel=1e-5)
        assert (a.tokens, a.greedy) == (b.tokens, b.greedy)
    assert score(loaded, []) == []
    for request, message in (
        (Request([1, 2], 2), "nothing to score"),
        (Request([1], 1), "nothing to score"),
        (Request([1, V], 1), "id 51 is outside|id 50 is outside"),
        (Request([1] * 20, 2), "18 tokens to score: the model has seq_length = 16"),
    ):
        with pytest.raises(InputError, match=message):
            score(loaded, [request])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "log_probabilities", lambda ids, labels: 2 * [labels * torch.nan])
        with pytest.raises(InputError, match=r"logits are not finite: weights"):
            score(loaded, requests())
    with pytest.raises(InputError, match=r"stride = 17; legal: 1 to seq_length = 16"):
        perplexity(loaded, Dataset(shards(tmp_path / "data")), 17)
    with pytest.raises(InputError, match=r"vocabulary of 257, the model one of 50"):
        perplexity(loaded, Dataset(shards(tmp_path / "bytes", 257)))


def test_harness_without_its_package(tmp_path):
    """Its three questions, on one rank."""
    loaded = one_rank(tmp_path, seq_length=32)
    text = Text(ByteTokenizer(), (), frozenset({256}), 256)
    harness = Harness(loaded, text)
    pairs = [("ab", " cd"), ("ab cd", "e"), ("ab", " cde"), ("", "ab"), ("", "ab cde")]
    (cd, _), (e, _), (cde, _), (ab, _), (whole, _) = harness.loglikelihood(pairs)
    assert cd + e == pytest.approx(cde, rel=1e-5)
    assert harness.loglikelihood_rolling(["ab", "ab cde"]) == pytest.approx([ab, whole], rel=1e-5)
    long = "x" * 100  # windows of 32 tokens
    parts = [*harness.loglikelihood([("", "x" * 32), ("x", "x" * 32)])]
    (rolled,) = harness.loglikelihood_rolling([long])
    tail = score(loaded, [Request([*b"x" * 33], 29)])[0].log_likelihood
    assert rolled == pytest.approx(parts[0][0] + 2 * parts[1][0] + tail, rel=1e-5)
    (greedy,) = harness.generate_until([("ab", {"max_gen_toks": 5})])
    ids = [*b"ab", *greedy.encode(errors="surrogateescape")]
    (again,) = harness.generate_until([("ab", {"max_gen_toks": 5, "until": greedy[1]})])
    assert again == greedy[: greedy.index(greedy[1])]
    assert harness.generate_until([("y" * 50, {"max_gen_toks": 4})])[0] != ""
    assert len(ids) >= 2
    options = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 5}
    mixed = harness.generate_until([("ab", options), ("ab", {"max_gen_toks": 5}), ("ab", options)])
    assert mixed[1] == greedy and mixed[0] != mixed[2]


@pytest.fixture
def run_of_bytes(tmp_path):
    run = _stored.stored(tmp_path / "run", 257, seq_length=64)
    folder = shards(tmp_path / "data", 257, "bytes", (200,))
    with open(run / "config.toml", "a") as file:
        file.write(f'[[data.train]]\npath = "{folder}"\n')
    lines = [{"context": c, "choices": ["yes", "no", "perhaps"], "answer": 1} for c in "abcdef"]
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = [{"context": c, "answers": ["yes", "1"]} for c in "abc"]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return run


def test_the_command(run_of_bytes):
    folder = run_of_bytes.parent
    words = [str(run_of_bytes), "--data", str(folder / "data"), "--words", "50", "--samples", "3"]
    words += ["--tasks", str(folder / "choices.jsonl"), "--tasks", str(folder / "answers.jsonl")]
    words += ["--shots", "2", "--shots-from", str(folder / "choices.jsonl"), "--json"]
    words += ["--temperature", "0.9", "--max-new-tokens", "6", "--seed", "2"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.stdout
    printed = json.loads(result.stdout)
    assert printed["layout"] == "t=1,p=1,d=1" and printed["step"] == 7
    assert [task["kind"] for task in printed["tasks"]] == ["choice", "answers"]
    assert [task["shots"] for task in printed["tasks"]] == [2, 2] and printed["tasks"][1][
        "samples"
    ] == 3
    (measured,) = printed["perplexity"]
    assert measured["tokens"] == 199 and measured["words"] == 50
    assert measured["scored"] == "all tokens"
    shown = CliRunner().invoke(command, [*words[:5], *words[7:9]])
    assert "accuracy per character" in shown.output and "word perplexity" in shown.output


def test_the_average_of_the_weights(run_of_bytes, tmp_path):
    both = _stored.stored(tmp_path / "both", 257, average=0.2, seq_length=64)
    other = _stored.stored(tmp_path / "other", 257, factor=0.2, seq_length=64)

    def loss(path, *words):
        data = ["--data", str(run_of_bytes.parent / "data"), "--json"]
        result = CliRunner().invoke(command, [str(path), *data, *words])
        (measured,) = json.loads(result.stdout)["perplexity"]
        return measured["perplexity"]

    assert loss(both, "--ema") == loss(other) != loss(both)


def test_a_flipped_token_is_refused(run_of_bytes):
    data = run_of_bytes.parent / "data"
    (shard,) = data.glob("*.h5")
    with h5py.File(shard, "r+") as file:
        file["tokens"][5] ^= 1
    result = CliRunner().invoke(command, [str(run_of_bytes), "--data", str(data)])
    assert result.exit_code == 2 and not result.stdout
    assert "have checksum" in result.stderr.splitlines()[-1]


def test_weights_without_a_number_have_no_perplexity(run_of_bytes, tmp_path):
    def lost(name, values):
        return torch.full_like(values, torch.nan) if name == "final_norm.weight" else values

    source = _stored.stored(tmp_path / "lost", 257, seq_length=64, changed=lost)
    data = ["--data", str(run_of_bytes.parent / "data"), "--json"]
    result = CliRunner().invoke(command, [str(source), *data])
    assert result.exit_code == 2 and not result.stdout
    assert "logits are not finite" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to evaluate: give --data, --tasks, --code or --lm-eval"),
        (["--data", "nowhere"], "dataset nowhere: no such directory"),
        (["--tasks", "nowhere"], "nowhere: No such file"),
        (["--data", "d", "--shots", "3"], "--shots 3 needs --shots-from FILE"),
        (["--data", "d", "--shots-from", "x.jsonl"], "--shots-from needs --shots N"),
        (["--data", "d", "--samples", "3"], "--samples above 1 are all the same"),
        (["--data", "d", "--data", "e", "--words", "3"], "--words needs exactly one --data"),
        (["--data", "d", "--top-p", "2"], "top_p = 2.0"),
        (["--data", "d", "--until", ""], "--until '' would end every answer"),
        (["--data", "d", "--extract", "("], "--extract (: missing )"),
    ],
)
def test_bad_input_is_one_line(run_of_bytes, words, message):
    result = CliRunner().invoke(command, [str(run_of_bytes), *words])
    assert result.exit_code == 2
    _, line = result.stderr.strip().splitlines()  # behind what is loaded
    assert message in line


def test_a_question_that_does_not_fit_is_named(run_of_bytes):
    file = run_of_bytes.parent / "long.jsonl"
    lines = [{"context": "a", "choices": ["x", "y" * n], "answer": 0} for n in (3, 70)]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(command, [str(run_of_bytes), "--tasks", str(file)])
    assert result.exit_code == 2
    assert f"{file}:2: 71 tokens to score: the model has seq_length = 64" in result.stderr


def test_values_of_the_harness_may_be_words():
    harness = {"yesno": {"alias": "yesno", "acc,none": 0.5, "acc_stderr,none": "N/A", "n": 1200}}
    head = {"checkpoint": "c", "step": 1, "layout": "t=1", "precision": "fp32"}
    lines = _table({**head, "perplexity": [], "tasks": [], "lm_eval": harness}).splitlines()
    assert [line.split() for line in lines[3:]] == [
        ["acc,none", "0.5000"],
        ["acc", "stderr,none", "N/A"],
        ["n", "1,200"],
    ]


@pytest.mark.long
def test_the_harness_itself(run_of_bytes):
    """A task file of one's own, run by lm-evaluation-harness where it is installed."""
    pytest.importorskip("lm_eval")
    folder = run_of_bytes.parent
    (folder / "tasks").mkdir()
    (folder / "tasks/yesno.yaml").write_text(
        f"""
task: yesno
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder / "choices.jsonl"}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    )
    words = [str(run_of_bytes), "--lm-eval", "yesno", "--lm-eval-path", str(folder / "tasks")]
    words += ["--tasks", str(folder / "choices.jsonl"), "--json"]
    done = mpirun(2, ["-m", "ptdmpi", "evaluate", *words, "--layout", "t=2"], timeout_s=240)
    as_text = mpirun(1, ["-m", "ptdmpi", "evaluate", *words[:-1]], timeout_s=240)
    assert "\nyesno\n" in as_text.stdout and "  acc stderr,none " in as_text.stdout
    result = json.loads(done.stdout.strip().splitlines()[-1])
    ours, (theirs_,) = result["tasks"][0], result["lm_eval"].values()
    assert theirs_["acc,none"] == ours["accuracy"]
    assert theirs_["acc_norm,none"] == ours["accuracy_per_character"]
