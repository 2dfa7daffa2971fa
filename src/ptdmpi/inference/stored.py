"""A model on the disk: its shape and its weights, from a run directory, a converted one, or a
checkpoint. Without MPI."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptdmpi.base.box import Box
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.base import fingerprint
from ptdmpi.checkpoint.boxes import Reader
from ptdmpi.checkpoint.manifest import Manifest, sound_manifest
from ptdmpi.comm.communicator import OneRank
from ptdmpi.config import (
    Config,
    InputError,
    Layout,
    ModelConfig,
    TaskConfig,
    synthetic_config,
)
from ptdmpi.config.sections import AVERAGE
from ptdmpi.lineage.adapted import Adapted, Base, adapted_of, require_kind
from ptdmpi.lineage.judge import Before
from ptdmpi.lineage.trained_on import TrainedOn
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import Portion
from ptdmpi.model.parameters import Declaration, data_types
from ptdmpi.model.stage import TIED_NAME, Stage
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.model.tensor_parallel import TensorAxis

CONFIG = "config.toml"
# Beside it, of a model that came from Hugging Face: its own config.json, tokenizer and so on.
KEPT = "hugging_face"


@dataclass(frozen=True)
class StoredModel:
    """`path`: the directory that holds config.toml; `tree`: what stands in it, but the model that
    the checkpoint itself says."""

    path: Path
    checkpoint: Path
    tree: Mapping[str, Any]
    manifest: Manifest

    @property
    def vocab_size(self) -> int:
        return self.manifest[key(WEIGHTS, TIED_NAME)].shape[0]

    @property
    def trained_on(self) -> TrainedOn | None:
        """What its weights were trained on; None where an older version wrote them, or another
        program. Raises InputError for a damaged manifest."""
        return Before.of(self.checkpoint, self.manifest.said).trained_on

    @property
    def datasets(self) -> list[str]:
        """Paths of the shards that the model was trained on last; none where that was elsewhere, or
        on a task's files."""
        if self.tree.get("task", {}).get("kind", "none") != "none":
            return []
        if self.trained_on is not None:
            return [one.path for one in self.trained_on.last.sources]
        return [one["path"] for one in self.tree.get("data", {}).get("train", [])]

    @property
    def task(self) -> TaskConfig:
        """The task that it has a head for. Raises InputError where it does not say."""
        try:
            found = TaskConfig.model_validate(self.tree.get("task", {}))
        except ValueError as error:
            raise InputError(f"{self.path}: [task]: {error}") from None
        if (found.kind != "none") != (self.tree["model"].get("output_head") == "classes"):
            told = f'task.kind = "{found.kind}" and its head do not go together'
            raise InputError(
                f"{self.path / CONFIG}: {told}; legal: the [task] that it has a head for"
            )
        return found

    @property
    def began(self) -> Path | None:
        """The model that its run began from: what is frozen beneath its adapters, or
        `checkpoint.initial`."""
        adapt, checkpoint = (self.tree.get(name, {}) for name in ("adapt", "checkpoint"))
        frozen = adapt.get("base") if adapt.get("method", "none") != "none" else None
        found = frozen or checkpoint.get("initial")
        return Path(found) if found else None

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    def config(self, ranks: int = 1, precision: str = "fp32", **sizes: int) -> Config:
        """A configuration of this model for work without training, as `config_of` has it."""
        return config_of(self.tree["model"], ranks, precision, **sizes)

    def reader(self) -> Reader:
        return Reader(self.checkpoint, self.manifest)


def kind_of(average: bool) -> str:
    """What of a checkpoint stands for its weights: they themselves, or their moving average."""
    return AVERAGE if average else WEIGHTS


def manifest_of(checkpoint: Path, kind: str = WEIGHTS) -> Manifest:
    """What is in a checkpoint; of another `kind` than the weights, that in their place. Raises
    InputError."""
    manifest = sound_manifest(checkpoint)
    try:
        return manifest if kind == WEIGHTS else manifest.as_weights(kind)
    except InputError as error:
        raise InputError(f"checkpoint {checkpoint}: {error}") from None


def open_model(path: Path, kind: str = WEIGHTS) -> StoredModel:
    """The newest complete checkpoint that `path` names, and its config.toml; `kind` stands for its
    weights. Raises InputError."""
    checkpoint = examine.newest(path)
    manifest = manifest_of(checkpoint, kind)
    require_kind(checkpoint, manifest.said)
    if manifest.find(key(WEIGHTS, TIED_NAME)) is None:
        raise InputError(f"checkpoint {checkpoint} holds no {key(WEIGHTS, TIED_NAME)}")
    folders = (path, checkpoint.parent.parent, checkpoint)
    folder = next((one for one in folders if (one / CONFIG).is_file()), None)
    if folder is None:
        raise InputError(
            f"no {CONFIG} in {checkpoint.parent.parent}: it says what shape the model has, and "
            "stands in every run directory"
        )
    try:
        tree = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / CONFIG}: {error}") from None
    if not isinstance(tree.get("model"), dict):
        raise InputError(f"{folder / CONFIG} has no section [model]")
    # the file has what a command asked for last, the checkpoint what was trained
    model = manifest.said["model"] or tree["model"]
    return StoredModel(folder, checkpoint, {**tree, "model": model}, manifest)


@dataclass(frozen=True)
class StoredAdapter:
    """Adapters on the disk: the checkpoint that holds them, and what it says of them."""

    checkpoint: Path
    adapted: Adapted
    manifest: Manifest

    def over(self, stored: StoredModel, config: Config) -> Config:
        """`config`, of the model beneath, with them, and with their head for a task, which reads
        texts as long as it was trained on. Raises InputError if they were trained over another."""
        self.adapted.require(
            self.checkpoint, Base(str(stored.checkpoint), fingerprint(stored.manifest))
        )
        update: dict[str, Any] = {"adapt": self.adapted.adapt}
        if self.adapted.has_head:
            update |= {"task": self.adapted.task, "model": self.model}
        return config.model_copy(update=update).adapted()

    @property
    def trained_on(self) -> TrainedOn | None:
        """What they were trained on; None where another program wrote them. Raises InputError for a
        damaged manifest."""
        return Before.of(self.checkpoint, self.manifest.said).trained_on

    @property
    def datasets(self) -> list[str]:
        """Paths of the shards that they were trained on last; none of those with a head for a
        task."""
        known = None if self.adapted.has_head else self.trained_on
        return [] if known is None else [one.path for one in known.last.sources]

    @property
    def model(self) -> ModelConfig:
        """The shape of the model beneath as they were trained with it, with their head."""
        return ModelConfig.model_validate(self.manifest.said["model"])


def open_adapter(path: Path, kind: str = WEIGHTS) -> StoredAdapter:
    """The adapters of the newest complete checkpoint that `path` names; `kind` stands for their
    weights. Raises InputError."""
    checkpoint = examine.newest(path)
    manifest = manifest_of(checkpoint, kind)
    found = adapted_of(checkpoint, manifest.said)
    if found is None:
        raise InputError(f"checkpoint {checkpoint} is a whole model, no adapter; legal: as RUN")
    return StoredAdapter(checkpoint, found, manifest)


def config_of(
    model: Mapping[str, Any],
    ranks: int = 1,
    precision: str = "fp32",
    tensor: int = 1,
    pipeline: int = 1,
    data: int | None = None,
) -> Config:
    """A configuration for work without training. `data` None: what fills the ranks. Raises
    InputError."""
    if data is None:
        data = max(1, ranks // (tensor * pipeline))
    layout = Layout(tensor, pipeline, data)
    return synthetic_config(layout, model, ranks, precision={"compute": precision})


def declarations(config: Config, vocab_size: int) -> dict[str, Declaration]:
    """Every parameter of the model by its logical name; nothing is allocated."""
    stage = Stage(config, vocab_size, range(config.model.layers), TensorAxis(OneRank()))
    return {name: weight.declaration for name, weight in stage.named_logical_parameters()}


def loaded_layer(
    config: Config, vocab_size: int, layer: int, reader: Reader
) -> tuple[Stage, ParameterBuffer]:
    """One layer of a model on the host with its weights, and what stands before the first or after
    the last; in the type of `config`, which is fp32 or fp64. Raises Damaged."""
    stage = Stage(config, vocab_size, range(layer, layer + 1), TensorAxis(OneRank()))
    host, precision = torch.device("cpu"), data_types(config.precision.compute)
    named = stage.named_logical_parameters()
    buffer = ParameterBuffer(named, precision, host, Portion(), trains=False)
    for name, entry in buffer.entries.items():
        whole = entry.view(buffer.weights)
        reader.read(key(WEIGHTS, name), Box.whole(whole.shape), whole.numpy())
    stage.place_tables(config.model, host)
    return stage, buffer


def require_weights(reader: Reader, needed: Mapping[str, Declaration]) -> None:
    """Raises InputError unless the checkpoint has exactly these weights in these shapes."""
    for name, declaration in needed.items():
        reader.require(key(WEIGHTS, name), declaration.shape)
    known = {key(WEIGHTS, name) for name in needed}
    prefix = key(WEIGHTS, "")
    there = reader.manifest.names
    extra = [name for name in there if name.startswith(prefix) and name not in known]
    if extra:
        raise InputError(
            f"checkpoint {reader.directory}: {extra[0]} is not of the model in its {CONFIG}"
        )
