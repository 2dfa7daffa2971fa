"""`ptdmpi plan`: its JSON, its text, what it refuses, and that it starts light."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from ptdmpi.commands.plan import command
from ptdmpi.config import InputError, resolve
from ptdmpi.config.precision import PRECISIONS
from tests.parallel import ROOT

COMMON = ("--model", "l=8,h=1024,a=16", "--cluster", "selene", "--batch", "16")
KEYS = {
    "layout",
    "step_time_s",
    "model_tflops_per_rank",
    "hardware_tflops_per_rank",
    "mfu",
    "bubble_fraction",
    "peak_memory_bytes",
    "fits",
}


def run(*arguments):
    return CliRunner().invoke(command, [*COMMON, *arguments], catch_exceptions=False)


def test_search_prints_json_best_first():
    plain = ("--order", "best", "--tokens", "1e9", "--json")
    result = json.loads(run("--ranks", "8", *plain).stdout)
    times = [entry["step_time_s"] for entry in result["layouts"]]
    assert times == sorted(times) and len(times) == 5
    for entry in result["layouts"]:
        assert entry.keys() >= KEYS
        assert entry["fits"] is True and 0 < entry["mfu"] < 1
        assert entry["rank_hours"] == pytest.approx(entry["days"] * 24 * 8)
    assert result["heuristic"]["step_time_s"] >= times[0]
    assert result["microbatch_model"]["simulated_b"] >= 1


def test_one_layout_is_priced_even_where_it_does_not_fit():
    result = run(
        "--layout", "t=1,p=2,d=1,v=1,b=16", "--json", "--model", "l=8,h=12288,a=96"
    )  # fmt: skip
    (entry,) = json.loads(result.stdout)["layouts"]
    assert result.exit_code == 0 and entry["fits"] is False
    assert entry["peak_memory_bytes"] > entry["capacity_bytes"]
    assert sum(entry["memory_bytes"].values()) == pytest.approx(entry["peak_memory_bytes"])
    assert "DOES NOT FIT" in run(
        "--layout", "t=1,p=2,d=1,v=1,b=16", "--model", "l=8,h=12288,a=96"
    ).stdout  # fmt: skip


def test_options_reach_the_layout():
    options = ("--schedule", "gpipe", "--recompute", "full", "--sequence-parallel", "--zero", "1")
    more = ("--no-scatter-gather", "--dp-overlap")
    result = json.loads(run("--layout", "t=2,p=2,d=2,v=2,b=1", *options, *more, "--json").stdout)
    (entry,) = result["layouts"]
    assert (entry["schedule"], entry["recompute"], entry["zero"]) == ("gpipe", "full", 1)
    assert entry["sequence_parallel"] and entry["dp_overlap"] and not entry["scatter_gather"]
    options = ("--layout", "t=2,p=2,d=2,b=1", "--partition-activations")
    result = run(*options, "--recompute", "full", "--json")
    (entry,) = json.loads(result.stdout)["layouts"]
    assert entry["partition_activations"]
    assert json.loads(result.stdout)["train"]["recompute"]["partition_activations"]
    assert "recompute full, partitioned" in run(*options, "--recompute", "full").stdout
    with pytest.raises(InputError, match=r'only with recompute.mode = "full"'):
        run(*options)


def test_text_and_pictures(tmp_path):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    result = run("--ranks", "8", "--png", str(picture), "--trace", str(trace))
    words = ("a step of", "bubble", "rules of thumb of the PTD-P paper", "layout by the rules")
    for word in (*words, "best b by its formula", "as many tensor ranks as a node has"):
        assert word in result.stdout
    assert picture.stat().st_size > 1000 and json.loads(trace.read_text())


def test_layers_that_are_recomputed_are_priced_and_named():
    options = ("--layout", "t=1,p=1,d=1,v=1,b=1", "--recompute", "full")
    entries = []
    for more in ((), ("--recompute-layers", "3"), ("--recompute-layers", "1")):
        told = json.loads(run(*options, *more, "--json").stdout)
        entries += told["layouts"]
        assert told["train"]["recompute"]["layers"] == (int(more[1]) if more else "all")
    times = [entry["step_time_s"] for entry in entries]
    peaks = [entry["peak_memory_bytes"] for entry in entries]
    assert times == sorted(times, reverse=True) and peaks == sorted(peaks)
    assert "recompute full of 3 layers" in run(*options, "--recompute-layers", "3").stdout


def test_a_first_stage_with_fewer_layers_is_priced_advised_and_trained():
    options = ("--layout", "t=1,p=2,d=1,v=1,b=4", "--model", "l=16,h=1024,a=16,V=5000")
    even, uneven = (
        json.loads(run(*options, *more, "--json").stdout) for more in ((), ("--first-layers", "7"))
    )
    assert uneven["train"]["parallel"]["first_layers"] == 7
    (one,), (other,) = even["layouts"], uneven["layouts"]
    assert one["first_layers"] is None and other["first_layers"] == 7
    assert other["step_time_s"] > one["step_time_s"]  # nine layers on the other stage
    assert other["peak_memory_bytes"] < one["peak_memory_bytes"]
    assert "7 layers in the first stage" in run(*options, "--first-layers", "7").stdout
    with pytest.raises(InputError, match=r"first_layers = 16: legal: 1 to 15"):
        run(*options, "--first-layers", "16")
    with pytest.raises(InputError, match="there is one stage"):
        run("--layout", "t=1,p=1,d=1,v=1,b=1", "--first-layers", "2")
    with pytest.raises(InputError, match="--uneven searches for the number"):
        run(*options, "--uneven")
    found = json.loads(run("--ranks", "8", "--first-layers", "1", "--json").stdout)["layouts"]
    assert {entry["first_layers"] for entry in found} <= {None, 1}
    small = ("--model", "l=6,h=512,a=8,V=60000", "--ranks", "4", "--batch", "8", "--json")
    times = [
        json.loads(run(*small, *more).stdout)["layouts"][0]["step_time_s"]
        for more in ((), ("--uneven",))
    ]
    assert times[1] <= times[0]


def test_a_preset_with_other_sizes_trains_so():
    options = ("--model", "gpt3-125m,s=1024,V=5000", "--ranks", "8", "--json")
    told = json.loads(run(*options).stdout)
    assert told["seq_length"] == 1024
    assert told["train"]["model"] == {"preset": "gpt3-125m", "seq_length": 1024}


def test_why_explains():
    asked = ("--why", "t=1,p=8,d=1,v=1,b=4")
    result = run(*asked)
    words = r"step time compared with the best layout; the largest difference: \w+, .* more"
    assert re.search(words, result.stdout)
    told = json.loads(run(*asked, "--json").stdout)
    own, best = told["why"]["layout"]["step_parts_s"], told["layouts"][0]["step_parts_s"]
    most = max(own, key=lambda part: abs(own[part] - best[part]))
    assert told["why"]["largest_difference"]["part"] == most
    assert told["why"]["largest_difference"]["seconds"] == own[most] - best[most]
    assert "t=1,p=8,d=1,v=1,b=4, 1f1b, recompute none" in result.stdout
    assert "the single changes that help most" in result.stdout


def test_why_takes_two_changes_where_one_is_too_few():
    """187 GiB on two ranks: neither recomputation nor the optimizer on the host alone suffices."""
    model = ("--model", "l=8,h=12288,a=96", "--why", "t=2,p=1,d=1,b=4", "--headroom", "0")
    result = run(*model)
    assert "the fastest layouts that fit after one or two changes" in result.stdout
    assert "recompute selective, --offload optimizer" in result.stdout
    why = json.loads(run(*model, "--json").stdout)["why"]
    assert why["changes_at_once"] == 2 and not why["layout"]["fits"]
    assert all(entry["fits"] for entry in why["changes"])


LONG = ("--model", "l=4,h=512,a=8,s=32768,V=5000", "--batch", "8")


def test_what_a_cut_sequence_sends_is_shown_apart():
    """By group of ranks, as the closed forms count it; layouts that do not cut have no such row."""
    cut = (*LONG, "--layout", "t=2,c=2,p=1,d=2,b=1")
    (entry,) = json.loads(run(*cut, "--json").stdout)["layouts"]
    assert entry["layout"].startswith("t=2,c=2,p=1,d=2")
    assert sum(entry["step_parts_s"].values()) == pytest.approx(entry["step_time_s"])
    assert entry["step_parts_s"]["context"] > 0 and set(entry["sent"]) >= {"tensor", "context"}
    keys = 2 * 32768 * 512 // 2 * 2  # K and V of all positions, half of the heads, in bf16
    layers, microbatches = 4, 4
    for kind in ("all_gather", "reduce_scatter"):
        numbers = entry["sent"]["context"][kind]
        assert numbers == {"messages": layers * microbatches, "bytes": 16 * keys // 2}
    text = run(*cut).stdout
    assert "c context" in text and "context axis" in text
    assert "context         256.0 MiB in 16 all-gathers, 256.0 MiB in 16 reduce-scatters" in text
    (whole,) = json.loads(run(*LONG, "--layout", "t=2,d=4", "--json").stdout)["layouts"]
    assert "context" not in whole["step_parts_s"] and "sent" not in whole
    assert "context" not in run(*LONG, "--layout", "t=2,d=4").stdout


@pytest.mark.long
def test_a_long_sequence_is_searched_with_c_and_explained():
    asked = (*LONG, "--ranks", "32", "--why", "t=8,d=4")
    told = json.loads(run(*asked, "--json").stdout)
    assert any("c=" in entry["layout"] for entry in told["layouts"])
    assert f"c={told['train']['parallel']['context']}," in told["layouts"][0]["layout"]
    assert "context" in run(*asked).stdout


def test_the_first_screen_says_what_its_words_mean_and_what_to_do_next():
    model = ("--model", "gpt3-125m", "--layout", "t=2,p=2,d=2,v=2,b=1")
    text = run(*model).stdout
    for word in ("126.0M parameters, 8 ranks of selene, bf16, batch 16 of 2048 tokens", " ms"):
        assert word in text
    for letter in ("t tensor", "bubble: idle over", "comm: messages", "MFU without recomputation"):
        assert letter in text
    lines = text.partition("and in CONFIG\n")[2]
    chosen = tomllib.loads(lines)
    assert chosen == json.loads(run(*model, "--json").stdout)["train"]
    data = {"train": [{"path": "data"}]}
    config = resolve({"run": {"name": "run", "steps": 1}, "data": data, **chosen}, 8)
    assert config.parallel.virtual == 2 and config.parallel.schedule == "interleaved"
    assert config.batch.global_size == 16 and config.precision.compute == "bf16"
    assert config.model.layers == 12


def test_what_is_sharded_is_in_table_json_and_configuration():
    sharding = ("--zero", "3", "--shard-group", "2", "--offload", "optimizer")
    common = ("--layout", "t=2,p=1,d=4,b=1", *sharding)
    text, found = run(*common).stdout, json.loads(run(*common, "--json").stdout)
    assert "ZeRO 3 in groups of 2, offload optimizer" in text and "on the host" in text
    (entry,) = found["layouts"]
    assert (entry["zero"], entry["shard_group"], entry["shards"]) == (3, 2, 2)
    assert entry["offload"] == "optimizer" and entry["host_memory_bytes"] > 0
    assert sum(entry["memory_bytes"].values()) == pytest.approx(entry["peak_memory_bytes"])
    given = {"run": {"name": "run", "steps": 1}, "data": {"train": [{"path": "data"}]}}
    given["model"] = {"layers": 8, "hidden": 1024, "heads": 16, "seq_length": 2048}
    layout = resolve({**given, **found["train"]}, 8).layout
    assert (layout.zero, layout.shard_group, layout.offload) == (3, 2, "optimizer")
    node = json.loads(
        run("--layout", "t=4,d=4", "--zero", "1", "--shard-group", "node", "--json").stdout
    )
    assert node["layouts"][0]["shard_group"] == 2
    for entry in json.loads(run("--ranks", "8", "--zero", "2", "--json").stdout)["layouts"]:
        assert entry["zero"] == 2


def test_a_layout_has_sequence_parallelism_where_that_is_faster():
    model = ("--model", "gpt3-175b", "--batch", "64", "--layout", "t=8,p=8,d=1", "--json")
    asked = (("--sequence-parallel",), ("--no-sequence-parallel",), ())
    on, off, either = (json.loads(run(*model, *one).stdout)["layouts"][0] for one in asked)
    assert either["sequence_parallel"] and on["step_time_s"] < off["step_time_s"]
    assert either == on


def test_what_training_does_not_do_is_said():
    common = ("--layout", "t=2,p=2,d=2,v=2,b=1", "--dp-overlap")
    assert "this layout is only a forecast" in run(*common).stdout
    assert json.loads(run(*common, "--json").stdout)["train"] is None


def test_small_models_are_not_rounded_away():
    text = run("--layout", "t=1,d=1", "--model", "l=2,h=16,a=2,s=16").stdout
    assert " MiB" in text and not re.search(r" 0\.0+ (?!ms)", text)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "give --ranks"),
        (("--layout", "t=3,d=1"), "heads"),
        (("--layout", "t=2,p=2,d=3", "--ranks", "8"), "t c p d = 12"),
        (("--layout", "t=2,p=2"), "give --ranks, or d"),
        (("--layout", "t=2,d=1,t=4"), "t is given twice"),
        (("--ranks", "8", "--precision", "fp8", "--lora", "4"), "does not belong to --lora"),
        (("--ranks", "8", "--recompute-layers", "2"), "belongs to --recompute full"),
        (("--ranks", "0"), "--ranks 0: must be a whole number, 1 to 1,000,000,000"),
        (("--ranks", "1e9"), "--ranks 1e9: must be a whole number"),
        (("--ranks", "1000000000"), "is legal on 1,000,000,000 ranks.*: 2048 ranks"),
        (("--layout", "d=1", "--batch", "10001", "--png", "a.png"), "--batch of at most 10000"),
        (("--ranks", "8", "--batch", "-1"), "--batch -1: must be"),
        (("--ranks", "8", "--tokens", "nan"), "--tokens nan: must be a finite number above 0"),
        (("--ranks", "8", "--tokens", "0"), "--tokens 0: must be"),
        (("--ranks", "8", "--tokens", "inf"), "--tokens inf: must be"),
        (("--ranks", "8", "--memory-png", "a.jpg"), "a.jpg: pictures are .png or .svg"),
        (("--ranks", "8", "--png", "missing/a.png"), "cannot be written: No such file"),
        (("--ranks", "8", "--memory-png", "missing/a.png"), "cannot be written: No such file"),
        (("--ranks", "8", "--batch", "1000000000000"), "--batch 1000000000000: must be.* 1 to 1,0"),
        (("--ranks", "8", "--model", "l=-4,h=8,a=2"), "l=-4.*: layers = -4: .* than or equal to 1"),
        (("--ranks", "8", "--model", "l=20000,h=8,a=2"), "layers = 20000: .* or equal to 10000"),
        (("--ranks", "8", "--zero", "4"), "--zero 4: must be a whole number, 0 to 3"),
        (("--ranks", "8", "--shard-group", "0"), '--shard-group 0: must be "all", "node" or'),
        (("--layout", "d=4", "--zero", "1", "--shard-group", "3"), "does not divide the data axis"),
        (("--layout", "d=4", "--shard-group", "2"), "shard_group = 2 has an effect only with"),
        (("--ranks", "12", "--zero", "3", "--shard-group", "5"), "5 does not divide the data axis"),
        (("--ranks", "8", "--zero", "0", "--shard-group", "2"), "only with parallel.zero = 1"),
        (("--ranks", "8", "--zero", "0", "--shard-group", "node"), '"node" has an effect only'),
        (("--ranks", "8", "--zero", "2", "--schedule", "zb-v"), "delays the gradients of weights"),
        (("--ranks", "8", "--recompute", "none", "--partition-activations"), "only with recomput"),
        (
            ("--ranks", "8", "--sequence-parallel", "--partition-activations"),
            "divides activations already",
        ),
        (
            ("--layout", "d=1", "--offload", "disk"),
            "has no known time without host.disk_bytes_per_s",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, word):
    with pytest.raises(InputError, match=word) as error:
        run(*arguments)
    assert "\n" not in str(error.value)


def test_it_runs_without_heavy_packages():
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'mpi4py', 'h5py', 'matplotlib', 'numpy')))\n"
        "from ptdmpi.cli import main\n"
        "sys.argv = ['ptdmpi', 'plan', *sys.argv[1:]]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *COMMON, "--layout", "t=8,d=1", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["layouts"][0]["layout"] == "t=8,p=1,d=1,v=1,b=1"


def test_the_batch_of_a_preset_is_the_published_one():
    where = ("--cluster", "selene", "--layout", "t=1,p=1,d=64,b=16", "--json")
    runner = CliRunner()
    found = runner.invoke(command, ["--model", "bert-336m", *where], catch_exceptions=False)
    assert json.loads(found.stdout)["batch"] == 1024


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        ("gpt3-125m,s=1024", 512),  # the published 256 are of 2048 tokens each
        ("llama3-8b", 512),  # none is published: 4 Mi tokens, 8192 each
        ("llama3-8b,s=131072", 32),
    ],
)
def test_a_preset_without_a_published_batch_has_a_usual_one(model, batch):
    where = ("--cluster", "h100", "--layout", "t=2,p=1,d=1,v=1,b=1", "--json")
    result = CliRunner().invoke(command, ["--model", model, *where], catch_exceptions=False)
    assert json.loads(result.stdout)["batch"] == batch
    assert f"{batch} sequences" in result.stderr and "--batch" in result.stderr


def test_the_help_lists_every_precision():
    shown = CliRunner().invoke(command, ["--help"]).stdout
    assert all(name in shown for name in PRECISIONS)
