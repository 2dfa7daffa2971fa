"""The draft of a commented configuration file for a given model, data and number of ranks (`ptdmpi
init`)."""

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
from ptdmpi.config.presets import model_presets, recipe
from ptdmpi.data.shards import Dataset
from ptdmpi.inference.stored import open_model
from ptdmpi.plan.cost import relief
from ptdmpi.plan.machine.cluster import load_cluster, load_model, model_section
from ptdmpi.plan.search import choose
from ptdmpi.preview.wish import SMALL, Wish
from ptdmpi.train.checks import with_form

MOST_TENSOR = 8  # Most nodes have 8 devices, and a tensor-parallel group should stay inside a node.
BATCH = 64  # Number of sequences per step for a model without a published batch size.
MICRO_SIZES = (8, 4, 2, 1)
LEAST_STEPS = 20  # if an epoch would have fewer steps, the batch is made smaller
MOST_STEPS = 10_000
ADAPTER_RANK = 16
ADAPT_COMMENTS = {
    "method": 'or "ia3", or "full" (all weights): both without rank and alpha',
    "rank": "of the two matrices of each adapter",
    "base": "the frozen model",
}

TEMPLATE = """\
# {title}
# mpirun -n {ranks} ptdmpi train {file}            trains; run it again to resume
# mpirun -n {ranks} ptdmpi train {file} --dry-run  checks and shows everything first
# docs/reference/configuration.md has every key.

[run]
name = {name}{dir_hint}
steps = {steps}              # {epochs} of the data

[model]
{model}

[parallel]                # tensor * pipeline * data = {counted_ranks}; data takes the other ranks
tensor = {tensor}                # ranks that divide each layer; keep them inside a node
pipeline = {pipeline}              # groups of consecutive layers
virtual = {virtual}  # chunks of layers per pipeline rank; above 1: interleaved schedule
{sequence}
[batch]
global_size = {batch}          # sequences per step, whatever the layout
micro_size = {micro}  # sequences at a time on a rank: more are faster, but need memory

[precision]
compute = "{precision}"         # "bf16" on GPUs; master weights and gradients stay float32
{recompute}{adapt}
[optimizer]
{optimizer}

[data]
{valid}{boundaries}

[[data.train]]            # one table for each dataset of a mixture, with its weight
path = {train}

[checkpoint]
every_minutes = 15        # a crash loses at most the training of this time
keep = 2                  # newest checkpoints that are kept

[log]
every_steps = {log}
{validate}
# tensorboard = true      # docs/how-to/watching.md
"""


@dataclass(frozen=True)
class Subject:
    """The model that the drafted configuration trains. `name` is the model's name in the title of
    the file, and `section` is the section [model]. `recipe` has the published training settings of
    the model, and `adapt` is the section [adapt]; both may be empty."""

    name: str
    section: dict[str, Any]
    recipe: dict[str, Any]
    adapt: dict[str, Any]

    @staticmethod
    def of(wish: Wish) -> "Subject":
        """Return the model that `wish` names. Raise InputError if there is no such model."""
        if wish.adapt is not None:
            return Subject._of_base(wish.adapt, wish.model)
        name = wish.model or SMALL
        if name in model_presets():
            return Subject(name, {"preset": name}, recipe(name), {})
        load_model(name)  # raises InputError for wrong sizes
        return Subject(name, model_section(name), {}, {})

    @staticmethod
    def _of_base(base: Path, model: str | None) -> "Subject":
        """Return the model for a run that trains adapters of the frozen model at the path
        `base`."""
        if model is not None:
            raise InputError(
                f"--model {model} and --adapt {base} both name a model; legal: one of the two"
            )
        stored = open_model(base)
        adapt = {"method": "lora", "rank": ADAPTER_RANK, "alpha": 2.0 * ADAPTER_RANK}
        section = {key: value for key, value in stored.tree["model"].items() if key != "vocab_size"}
        if section.get("balance", "bias") != "bias":
            # the routers of the experts are frozen, so a balance loss would have no effect
            section["balance"] = "none"
        for key in ("balance_coefficient", "z_loss_coefficient"):
            section.pop(key, None)
        return Subject(f"LoRA of {base}", section, {}, {**adapt, "base": str(base)})


def draft(wish: Wish) -> str:
    """Return a configuration for `wish` as TOML. Raise InputError if no layout of `wish.ranks`
    ranks fits."""
    train, valid = _folders(wish)
    dataset = Dataset(train)
    subject = Subject.of(wish)
    data: dict[str, Any] = {"train": [{"path": train}]}
    if valid is not None:
        data["valid"] = valid
    if any(header.weights_byte_offset for header in dataset.headers):
        # conversations in the same sequence must not attend to each other
        data["document_boundaries"] = True
    base: dict[str, Any] = {
        "run": {"name": wish.name or wish.file.stem, "steps": wish.steps or 1},
        "model": subject.section,
        "batch": {"global_size": 1},
        "precision": {"compute": _precision(wish)},
        "data": data,
    }
    if subject.adapt:
        base["adapt"] = subject.adapt
        # add the format in which the base model is quantized, because a quantized model needs less
        # memory
        base = dict(with_form(base))
    samples = dataset.samples(resolve(base, 1).model.text_length)
    published = subject.recipe.get("batch", {}).get("global_size", BATCH)
    base["batch"] = {"global_size": max(1, min(published, samples // LEAST_STEPS))}
    config = _laid_out(base, wish, dataset.vocab_size)
    epoch = max(1, samples // config.batch.global_size)
    steps = wish.steps or min(MOST_STEPS, epoch)
    text = _written(wish, subject, config, data, steps=steps, samples=samples)
    resolve(with_form(tomllib.loads(text)), wish.ranks)
    return text


def _precision(wish: Wish) -> str:
    """Return the compute type of the run. If `wish` names a cluster, the compute type is the first
    of bf16, fp16 and fp32 that the cluster's device supports. Without a cluster, it is bf16 on a
    GPU and fp32 on a CPU."""
    if wish.cluster is None:
        return "bf16" if wish.on_gpu else "fp32"
    known = load_cluster(wish.cluster).device.peak_flops
    return next((precision for precision in ("bf16", "fp16") if precision in known), "fp32")


def _folders(wish: Wish) -> tuple[str, str | None]:
    """Return the directories of training and validation shards.

    Usually these are the directories that `wish` names. If the data directory of `wish` contains a
    folder `train` but no shards, the training shards are in this folder. If the data directory then
    also contains a folder `valid`, and `wish` names no directory of validation shards, the
    validation shards are in this folder.
    """
    train = wish.data
    valid = wish.valid
    if not any(train.glob("*.h5")) and (train / "train").is_dir():
        if valid is None and (train / "valid").is_dir():
            valid = train / "valid"
        train = train / "train"
    return str(train), None if valid is None else str(valid)


def _laid_out(base: dict[str, Any], wish: Wish, vocab_size: int) -> Config:
    """Return the configuration with a layout. If `wish` names a cluster, this is the best layout on
    the cluster; otherwise it is the first layout that fits into memory. The global batch may be
    rounded up, so that the data-parallel size divides it.

    Without a cluster, the layouts are sorted by recomputation (less first), then by ranks per model
    (fewer first), then by the size of the tensor axis (smaller first), then by the size of the
    microbatch (larger first). They are tried in this order. Raise InputError if no layout fits.
    """
    if wish.cluster:
        bare = choose.bare(_divisible(base, wish.ranks))
        cluster = load_cluster(wish.cluster)
        prices, _ = choose.choose(bare, vocab_size, cluster, wish.ranks)
        tree = choose.applied(base, prices[0].layout.sections())
        return resolve(_divisible(tree, wish.ranks), wish.ranks)
    if wish.memory_bytes <= 1:
        raise InputError(
            f"--ranks {wish.ranks}: this machine has no memory left for each of so many ranks; "
            "legal: fewer ranks, or --cluster for ranks on several machines"
        )
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
    """Return the configuration tree, with the global batch size rounded up to a multiple of
    `ranks`."""
    size = -(-tree["batch"]["global_size"] // ranks) * ranks
    return {**tree, "batch": {**tree["batch"], "global_size": size}}


def _candidates(base: dict[str, Any], ranks: int) -> Iterator[dict[str, Any]]:
    """Yield a configuration tree for each layout on `ranks` ranks, the preferred layouts first."""
    for recompute in ("none", "selective", "full"):
        for model_ranks in divisors(ranks):
            for tensor in (t for t in divisors(model_ranks) if t <= MOST_TENSOR):
                data = ranks // model_ranks
                batch = -(-base["batch"]["global_size"] // data) * data
                for micro in (size for size in MICRO_SIZES if batch // data % size == 0):
                    sizes = {"tensor": tensor, "pipeline": model_ranks // tensor}
                    yield {
                        **base,
                        "parallel": sizes,
                        "batch": {"global_size": batch, "micro_size": micro},
                        "recompute": {"mode": recompute},
                    }


def _written(
    wish: Wish,
    subject: Subject,
    config: Config,
    data: dict[str, Any],
    *,
    steps: int,
    samples: int,
) -> str:
    """Return TEMPLATE (the text of a configuration) with its values filled in. `samples` is the
    number of samples in the training data."""
    warmup = f"warmup_steps = {max(1, steps // 20)}"
    rate = "2e-4" if subject.adapt else "3e-4"  # Dettmers et al. 2023, arXiv 2305.14314, table 9
    optimizer = f"learning_rate = {rate}      # the highest rate\n{warmup}"
    if subject.recipe.get("optimizer"):
        optimizer = "# as the preset's source states it (docs/reference/models.md)"
    sequence = ""
    if config.parallel.sequence_parallel:
        sequence = "sequence_parallel = true\n"
    recompute = ""
    if config.recompute.mode != "none":
        recompute = f'\n[recompute]\nmode = "{config.recompute.mode}"     # to fit into memory\n'
    valid = '# valid = "DIRECTORY"   # other shards'
    validate = "# validate_every_steps = 100"
    if "valid" in data:
        valid = f"valid = {_toml(data['valid'])}"
        validate = f"validate_every_steps = {max(1, steps // 10)}"
    epochs = steps * config.batch.global_size / samples
    return _aligned(
        TEMPLATE,
        title=f"{subject.name} on {counted(wish.ranks, 'rank')}",
        file=wish.file,
        name=_toml(config.run.name),
        dir_hint=f"  # the run directory is {config.run.dir}",
        steps=steps,
        epochs=f"{epochs:.3g} epoch{'s' * (epochs != 1)}",
        ranks=wish.ranks,
        counted_ranks=counted(wish.ranks, "rank"),
        model=_lines(subject.section),
        adapt=f"\n[adapt]\n{_lines(subject.adapt, ADAPT_COMMENTS)}\n" if subject.adapt else "",
        boundaries="\ndocument_boundaries = true" if "document_boundaries" in data else "",
        tensor=config.parallel.tensor,
        pipeline=config.parallel.pipeline,
        virtual=config.parallel.virtual,
        sequence=sequence,
        batch=config.batch.global_size,
        micro=config.batch.micro_size,
        precision=config.precision.compute,
        recompute=recompute,
        optimizer=optimizer,
        valid=valid,
        train=_toml(data["train"][0]["path"]),
        log=max(1, min(10, steps // 20)),
        validate=validate,
    )


def _lines(section: dict[str, Any], comments: dict[str, str] | None = None) -> str:
    """Return the keys of a section as lines of TOML. If `comments` has an entry for a key, the
    entry is written after the value as a comment."""
    known = comments or {}
    lines = []
    for key, value in section.items():
        comment = f"  # {known[key]}" if key in known else ""
        lines.append(f"{key} = {_toml(value)}{comment}")
    return "\n".join(lines)


def _aligned(template: str, **values: object) -> str:
    """Return the template with its values filled in. Comments after values begin in the same
    column."""
    lines = template.format(**values).splitlines()
    commented = re.compile(r"^([^#]*\S) +# (.*)$")
    return "".join(commented.sub(lambda m: f"{m[1]:<25} # {m[2]}", line) + "\n" for line in lines)


def _toml(value: Any) -> str:
    """Return a value in the notation of TOML."""
    return str(tomlkit.item(value).as_string())
