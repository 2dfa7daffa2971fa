"""A run imports only the features that it uses."""

import os
import subprocess
import sys

from tests._runs import corpus
from tests.parallel import ROOT

# The features that a plain GPT on token shards does not use. A name stands for a module of ptdmpi
# or for all modules of a folder.
UNUSED = (
    "data.labelled",
    "engine.compress",
    "engine.data_parallel.choco",
    "engine.data_parallel.compressed",
    "engine.data_parallel.decentralized",
    "engine.data_parallel.feedback",
    "engine.data_parallel.local",
    "engine.data_parallel.pairwise",
    "evaluate",
    "generate",
    "inference.model",
    "inference.stored",
    "inference.text",
    "inference.tokenizer",
    "model.experts.makers",
    "model.experts.mixture",
    "model.experts.tokens",
    "model.latent.absorbed",
    "model.latent.cache",
    "model.latent.heads",
    "model.latent.makers",
    "model.output.ahead",
    "model.output.distillation",
    "model.output.own",
    "model.output.preference",
    "plan.layer.latent.operators",
    "train.tasks.files",
    "train.tasks.measured",
    "train.tasks.source",
)
# the program prints the imported modules after a training, and the tables of the configuration that
# have been built before it
CODE = """
import atexit, sys
import ptdmpi.config as config
print(config.ModelConfig.__pydantic_complete__)
atexit.register(lambda: print(*sys.modules))
from ptdmpi.cli import main
main()
"""


def test_a_plain_run_imports_no_feature_that_it_does_not_use(tmp_path):
    corpus(tmp_path)
    values = (
        "parallel.tensor=1", "parallel.pipeline=1", "parallel.virtual=1", "run.steps=2",
        "run.kernels=default", "optimizer.warmup_steps=1", "log.bigram_baseline=false",
        f"run.dir={tmp_path}/run", f"data.valid={tmp_path}/valid",
        f'data.train=[{{path="{tmp_path}/train"}}]',
    )  # fmt: skip
    words = [word for value in values for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, "train", ROOT / "jobs/demo.toml", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "False", "an import of the configuration builds no table"
    modules = [name for name in lines[-1].split() if name.startswith("ptdmpi.")]
    assert "ptdmpi.train.loop" in modules
    folders = tuple(f"ptdmpi.{name}." for name in UNUSED)
    assert [name for name in modules if f"{name}.".startswith(folders)] == []
