"""Names of the Hugging Face hub, with folders in the place of the hub."""

import json
import shutil
import sys

import huggingface_hub
import pytest
from click.testing import CliRunner
from mpi4py import MPI

from data_prep.cli import main
from data_prep.sources import find_sources
from ptdmpi.base.errors import InputError
from ptdmpi.base.hub import downloaded, is_hub_name
from ptdmpi.cli import group
from ptdmpi.data.header import read_header


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Let the folders `hub/org/name` stand for the hub; return the requests made to it."""
    made = []

    def snapshot_download(name, **options):
        made.append((name, options["repo_type"]))
        if not (tmp_path / "hub" / name).is_dir():
            raise OSError(f"Repository Not Found: {name}.\nmore lines")
        return str(tmp_path / "hub" / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True),
        ("meta-llama/Llama-3.2-1B", True),
        ("gpt2", False),
        ("there/name", False),
        ("org/tokenizer.json", False),
        ("org/texts.jsonl.gz", False),
        ("../data", False),
        ("a/b/c", False),
        ("/abs", False),
        ("", False),
    ],
)
def test_names_are_told_from_paths(tmp_path, monkeypatch, name, is_one):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert is_hub_name(name) is is_one


def test_a_data_set_and_a_tokenizer_of_the_hub_make_shards(tmp_path, monkeypatch, requests):
    texts = tmp_path / "hub/org/texts/data"
    texts.mkdir(parents=True)
    (texts / "train.jsonl").write_text('{"text": "a b c a b"}\n' * 20)
    (texts / "card.md").write_text("not read")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ptdmpi-data", *words])
        main()

    run("train-tokenizer", "org/texts", "--output", "tok.json", "--vocab-size", "260")
    model = tmp_path / "hub/org/model"
    model.mkdir()
    shutil.copyfile("tok.json", model / "tokenizer.json")
    for tokenizer, output in (("tok.json", "here"), ("org/model", "there")):
        words = ("tokenize", "org/texts", "--tokenizer", tokenizer, "--output", output)
        run(*words, "--workers", "1")
    here = read_header(tmp_path / "here/shard-00000-00000.h5")
    there = read_header(tmp_path / "there/shard-00000-00000.h5")
    assert (here.checksum, here.tokenizer_sha256) == (there.checksum, there.tokenizer_sha256)
    assert {("org/texts", "dataset"), ("org/model", "model")} == set(requests)


def test_a_model_of_the_hub_is_converted(tmp_path, monkeypatch, requests, capsys):
    """The folder has a model that is refused, so that its message names the file that was read."""
    from ptdmpi.cli import main as ptdmpi

    model = tmp_path / "hub/org/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    monkeypatch.setattr(sys, "argv", ["ptdmpi", "convert", "from-hf", "org/model", "base"])
    with pytest.raises(SystemExit) as end:
        ptdmpi()
    assert end.value.code == 2 and str(model / "config.json") in capsys.readouterr().err
    assert requests == [("org/model", "model")] and not (tmp_path / "base").exists()


def test_without_the_hub_one_line_says_what_to_download(requests):
    for name, kind, option in (("a/b", "model", ""), ("a/c", "dataset", " --repo-type dataset")):
        with pytest.raises(InputError) as caught:
            downloaded(name, kind, ["*.json"])
        text = str(caught.value)
        assert f"Repository Not Found: {name}; where" in text and "\n" not in text
        assert f"hf download {name}{option} --local-dir DIR" in text
    with pytest.raises(InputError, match="is not a file or directory, and cannot be downloaded"):
        find_sources(["org/nowhere"])


def test_offline_the_real_library_ends_in_one_line(monkeypatch, tmp_path):
    """With the library's own switch, so that no test needs or waits for a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError) as caught:
        downloaded("org/name", "model", ["*.json"])
    assert "\n" not in str(caught.value) and "hf download org/name" in str(caught.value)


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """Let a stand-in for the hub record the uploads. The repository org/shut refuses them."""
    made = []

    class Api:
        def create_repo(self, name, **options):
            assert options == {"repo_type": "model", "private": True, "exist_ok": True}
            return f"https://hub/{name}"

        def upload_folder(self, repo_id, repo_type, folder_path):
            if repo_id == "org/shut":
                raise OSError("403 Forbidden.\nmore lines")
            made.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.chdir(tmp_path)
    return made


def test_an_adapter_is_uploaded_after_its_export(tmp_path, uploads):
    from tests import _stored
    from tests.convert.test_adapters import KINDS, V, engine_over, kept

    def export(*words):
        command = ["adapter", "export", "run", *words]
        return CliRunner().invoke(group, command, catch_exceptions=False)

    base = _stored.stored(tmp_path / "base", V, **_stored.LLAMA)
    kept(engine_over(MPI.COMM_SELF, base, KINDS["llama"]), base, tmp_path / "run")
    done = export("theirs", "--push", "org/name")
    assert done.exit_code == 0 and "uploaded theirs to https://hub/org/name" in done.output
    ((name, files),) = uploads
    assert name == "org/name" and {"adapter_config.json", "adapter_model.safetensors"} <= set(files)
    message = "org/shut: cannot be uploaded .* 403 Forbidden; other is complete: .*org/shut other"
    with pytest.raises(InputError, match=message):
        export("other", "--push", "org/shut")
    assert (tmp_path / "other/adapter_config.json").exists()
    with pytest.raises(InputError, match="is not the name of a repository on the hub"):
        export("none", "--push", "name")
    assert not (tmp_path / "none").exists() and len(uploads) == 1


def test_a_model_is_uploaded_after_its_conversion(tmp_path, uploads):
    from tests import _stored

    def convert(*words):
        command = ["convert", "to-hf", "run", *words]
        return CliRunner().invoke(group, command, catch_exceptions=False)

    _stored.stored(tmp_path / "run", 50, **_stored.LLAMA)
    done = convert("theirs", "--push", "org/name")
    assert done.exit_code == 0 and "uploaded theirs to https://hub/org/name" in done.output
    ((name, files),) = uploads
    assert name == "org/name" and {"config.json", "model.safetensors"} <= set(files)
    message = "org/shut: cannot be uploaded .* 403 Forbidden; other is complete: .*org/shut other"
    with pytest.raises(InputError, match=message):
        convert("other", "--push", "org/shut")
    assert (tmp_path / "other/config.json").exists()
    for bad in ("name", "a/b/c", "../a", ""):
        with pytest.raises(InputError, match="is not the name of a repository on the hub"):
            convert("none", "--push", bad)
    assert not (tmp_path / "none").exists() and len(uploads) == 1
