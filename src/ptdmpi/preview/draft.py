"""A first configuration: commented, for a model, data and a number of ranks, and it trains."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from ptdmpi.base.near import divisors
from ptdmpi.base.words import counted
from ptdmpi.config import Config, InputError, resolve
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.presets import DEFAULTS, model_presets, recipe
from ptdmpi.data.shards import Dataset
from ptdmpi.plan.cost import relief
from ptdmpi.plan.machine.cluster import load_cluster, load_model, preset_and_keys
from ptdmpi.plan.search import choose

SMALL = "l=4,h=128,a=4,s=128"  # minutes on a laptop
MOST_TENSOR = 8  # ranks of a node, as most machines have them
BATCH, MICRO = 64, (8, 4, 2, 1)
LEAST_STEPS, MOST_STEPS = 20, 10_000  # of one epoch

TEMPLATE = """\
# {title}
# mpirun -n {ranks} ptdmpi train {file}            trains; the same command again goes on
# mpirun -n {ranks} ptdmpi train {file} --dry-run  checks and shows everything first
# docs/reference/configuration.md has every key.

[run]
name = {name}{dir_hint}
steps = {steps}              # {epochs} of the data

[model]
{model}

[parallel]                # tensor * pipeline * data = {counted_ranks}; data is what remains
tensor = {tensor}                # ranks that share each layer; keep them inside a node
pipeline = {pipeline}              # groups of layers, one after the other
virtual = {virtual}  # chunks of layers per pipeline rank; above 1: interleaved schedule
{sequence}
[batch]
global_size = {batch}          # sequences per step, whatever the layout
micro_size = {micro}  # sequences at a time on a rank: more is faster, and takes memory

[precision]
compute = "{precision}"         # "bf16" on GPUs; masters and gradients stay float32
{recompute}
[optimizer]
{optimizer}

[data]
{valid}

[[data.train]]            # one table per dataset of a mixture, each with a weight of its own
path = {train}

[checkpoint]
every_minutes = 15        # what a crash can cost at most
keep = 2                  # the newest ones

[log]
every_steps = {log}
{validate}
# tensorboard = true      # docs/how-to/watching.md
"""


@dataclass(frozen=True)
class Wish:
    """What `ptdmpi init` is asked for. `memory_bytes`: what a rank has, where no cluster says it.
    `steps` None: one epoch, within bounds."""

    file: Path
    model: str
    data: Path
    ranks: int
    memory_bytes: int
    on_gpu: bool = False
    valid: Path | None = None
    cluster: str | None = None
    name: str | None = None
    steps: int | None = None


def draft(wish: Wish) -> str:
    """The configuration as TOML. Raises InputError where no layout of so many ranks fits."""
    train, valid = _folders(wish)
    dataset = Dataset(train)
    model = load_model(wish.model)
    samples = dataset.samples(model.config.text_length)
    preset = wish.model in model_presets()
    batch = recipe(wish.model)["batch"].get("global_size", BATCH) if preset else BATCH
    batch = max(1, min(batch, samples // LEAST_STEPS))
    base: dict[str, Any] = {
        "run": {"name": wish.name or wish.file.stem, "steps": wish.steps or 1},
        "model": {"preset": wish.model} if preset else _sizes(wish.model),
        "batch": {"global_size": batch},
        "precision": {"compute": _precision(wish)},
        "data": {"train": [{"path": train}], **({"valid": valid} if valid else {})},
    }
    config = _laid_out(base, wish, dataset.vocab_size)
    epoch = max(1, samples // config.batch.global_size)
    steps = wish.steps or min(MOST_STEPS, epoch)
    text = _written(wish, config, base["data"], steps, samples)
    resolve(tomllib.loads(text), wish.ranks)
    return text


def _precision(wish: Wish) -> str:
    """bf16 where there are GPUs that have it."""
    if wish.cluster is None:
        return "bf16" if wish.on_gpu else "fp32"
    known = load_cluster(wish.cluster).device.peak_flops
    return next((one for one in ("bf16", "fp16") if one in known), "fp32")


def _folders(wish: Wish) -> tuple[str, str | None]:
    """Training and validation shards: as named, or `train` and `valid` inside of what is named."""
    train, valid = wish.data, wish.valid
    if not any(train.glob("*.h5")) and (train / "train").is_dir():
        valid = valid or (train / "valid" if (train / "valid").is_dir() else None)
        train = train / "train"
    return str(train), None if valid is None else str(valid)


def _sizes(text: str) -> dict[str, Any]:
    """Keys of [model] for sizes such as "l=4,h=128,a=4", or a preset with sizes such as
    "llama3-8b,s=512": all that are given, and what a configuration needs. The vocabulary comes from
    the data."""
    preset, keys = preset_and_keys(text)
    keys.pop("vocab_size", None)
    if preset is not None:
        return {"preset": preset, **keys}
    keys = {"seq_length": DEFAULTS["seq_length"], **keys}
    return {key: keys[key] for key in ModelConfig.model_fields if key in keys}


def _laid_out(base: dict[str, Any], wish: Wish, vocab_size: int) -> Config:
    """The best layout on a known cluster, else the one with the fewest ranks to a model that fits
    into memory, and the largest microbatch."""
    if wish.cluster:
        bare = choose.bare(_divisible(base, wish.ranks))
        cluster = load_cluster(wish.cluster)
        found, _ = choose.choose(bare, vocab_size, cluster, wish.ranks)
        tree = choose.applied(base, found[0].layout.sections())
        return resolve(_divisible(tree, wish.ranks), wish.ranks)
    smallest: Config | None = None
    why = ""
    for tree in _candidates(base, wish.ranks):
        try:
            config = resolve(tree, wish.ranks)
        except InputError as error:
            why = why or str(error)
            continue
        if relief.Step.of(config, vocab_size).largest()[1].total <= wish.memory_bytes:
            return config
        smallest = config
    if smallest is None:
        raise InputError(f"no layout of {counted(wish.ranks, 'rank')} is legal: {why}")
    explained = relief.explain(relief.Step.of(smallest, vocab_size), wish.memory_bytes)
    raise InputError(f"the model does not fit on {counted(wish.ranks, 'rank')}\n{explained}")


def _divisible(tree: dict[str, Any], ranks: int) -> dict[str, Any]:
    """With a batch that all ranks could share."""
    size = -(-tree["batch"]["global_size"] // ranks) * ranks
    return {**tree, "batch": {**tree["batch"], "global_size": size}}


def _candidates(base: dict[str, Any], ranks: int) -> Iterator[dict[str, Any]]:
    for recompute in ("none", "selective", "full"):
        for model_ranks in divisors(ranks):
            for tensor in (t for t in divisors(model_ranks) if t <= MOST_TENSOR):
                data = ranks // model_ranks
                batch = -(-base["batch"]["global_size"] // data) * data
                for micro in (one for one in MICRO if batch // data % one == 0):
                    sizes = {"tensor": tensor, "pipeline": model_ranks // tensor}
                    yield {
                        **base,
                        "parallel": sizes,
                        "batch": {"global_size": batch, "micro_size": micro},
                        "recompute": {"mode": recompute},
                    }


def _written(wish: Wish, config: Config, data: dict[str, Any], steps: int, samples: int) -> str:
    preset = wish.model in model_presets()
    lines = [f"preset = {_toml(wish.model)}"]
    if not preset:
        lines = [f"{key} = {_toml(value)}" for key, value in _sizes(wish.model).items()]
    warmup = f"warmup_steps = {max(1, steps // 20)}"
    optimizer = f"learning_rate = 3e-4      # the peak\n{warmup}"
    if preset and recipe(wish.model)["optimizer"]:
        optimizer = "# as the preset's source states it (docs/reference/models.md)"
    tenth, mode = max(1, steps // 10), config.recompute.mode
    drawn = steps * config.batch.global_size / samples
    valid = data.get("valid")
    return _aligned(
        TEMPLATE,
        title=f"{wish.model} on {counted(wish.ranks, 'rank')}",
        file=wish.file,
        name=_toml(config.run.name),
        dir_hint=f"  # the run directory is {config.run.dir}",
        steps=steps,
        epochs=f"{drawn:.3g} epoch{'s' * (drawn != 1)}",
        ranks=wish.ranks,
        counted_ranks=counted(wish.ranks, "rank"),
        model="\n".join(lines),
        tensor=config.parallel.tensor,
        pipeline=config.parallel.pipeline,
        virtual=config.parallel.virtual,
        sequence="sequence_parallel = true\n" if config.parallel.sequence_parallel else "",
        batch=config.batch.global_size,
        micro=config.batch.micro_size,
        precision=config.precision.compute,
        recompute="" if mode == "none" else f'\n[recompute]\nmode = "{mode}"     # to fit\n',
        optimizer=optimizer,
        valid=f"valid = {_toml(valid)}" if valid else '# valid = "DIRECTORY"   # other shards',
        train=_toml(data["train"][0]["path"]),
        log=max(1, min(10, steps // 20)),
        validate=f"validate_every_steps = {tenth}" if valid else "# validate_every_steps = 100",
    )


def _aligned(template: str, **values: object) -> str:
    """The template filled in, its comments behind values one below the other."""
    lines = template.format(**values).splitlines()
    behind = re.compile(r"^([^#]*\S) +# (.*)$")
    return "".join(behind.sub(lambda m: f"{m[1]:<25} # {m[2]}", line) + "\n" for line in lines)


def _toml(value: Any) -> str:
    return str(tomlkit.item(value).as_string())
