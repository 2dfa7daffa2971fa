"""Reading the shape and the weights of a model on the disk, without MPI. The model is in a run
directory, in a converted model, or in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptdmpi.base.disk import read_file
from ptdmpi.base.toml import tables_of
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
from ptdmpi.plan.layer.ahead.modules import MODULES

CONFIG = "config.toml"
# The folder for config.json, tokenizer and other files that came with a model from Hugging Face.
KEPT = "hugging_face"


@dataclass(frozen=True)
class StoredModel:
    """A complete model on the disk.

    `path` is the directory that contains the model's config.toml. `tree` is the content of this
    config.toml, but its section [model] is replaced by the section [model] in the checkpoint.
    """

    path: Path
    checkpoint: Path
    tree: Mapping[str, Any]
    manifest: Manifest

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding table."""
        return self.manifest[key(WEIGHTS, TIED_NAME)].shape[0]

    @property
    def trained_on(self) -> TrainedOn | None:
        """Return the data that the weights were trained on, or None if this data is unknown.

        The data is unknown if an older version of ptdmpi, or another program, wrote the weights.
        Raise InputError for a damaged manifest.
        """
        return Before.of(self.checkpoint, self.manifest.said).trained_on

    @property
    def datasets(self) -> list[str]:
        """Return the paths of the shards that the model was last trained on.

        The list is empty if another program trained the model, or if the model was trained on the
        files of a task.
        """
        if self.tree.get("task", {}).get("kind", "none") != "none":
            return []
        if self.trained_on is not None:
            return [source.path for source in self.trained_on.last.sources]
        return [part["path"] for part in self.tree.get("data", {}).get("train", [])]

    @property
    def task(self) -> TaskConfig:
        """Return the task of the model's head. The task's `kind` is "none" if the model has no head
        for a task. Raise InputError if the section [task] and the model's head contradict each
        other."""
        try:
            task = TaskConfig.model_validate(self.tree.get("task", {}))
        except ValueError as error:
            raise InputError(f"{self.path}: [task]: {error}") from None
        if (task.kind != "none") != (self.tree["model"].get("output_head") == "classes"):
            raise InputError(
                f'{self.path / CONFIG}: task.kind = "{task.kind}" and its head are in conflict; '
                "legal: the [task] for which the head was trained"
            )
        return task

    @property
    def began(self) -> Path | None:
        """Return the path of the model from which the training run began. This is the base model if
        the run trained adapters, and otherwise the model in `checkpoint.initial`.

        The result is None if the run began from random weights.
        """
        adapt = self.tree.get("adapt", {})
        model = None
        if adapt.get("method", "none") != "none":
            model = adapt.get("base")
        model = model or self.tree.get("checkpoint", {}).get("initial")
        return Path(model) if model else None

    @property
    def step(self) -> int:
        """Return the number of steps for which the weights were trained."""
        return self.manifest.progress.step

    def config(self, ranks: int = 1, precision: str = "fp32", **sizes: int) -> Config:
        """Return a configuration of this model for use without training (see `config_of`)."""
        return config_of(self.tree["model"], ranks, precision, **sizes)

    def reader(self) -> Reader:
        """Return a reader for the checkpoint's tensors."""
        return Reader(self.checkpoint, self.manifest)


def kind_of(average: bool) -> str:
    """Return the kind of state that is loaded as the weights of a model: the moving average of the
    trained weights if `average` is True, and otherwise the trained weights."""
    return AVERAGE if average else WEIGHTS


def manifest_of(checkpoint: Path, kind: str = WEIGHTS) -> Manifest:
    """Return the manifest of a checkpoint. In the returned manifest, the tensors of the kind `kind`
    have the names of the weights.

    Raise InputError if the manifest is damaged, or the checkpoint has no state of the kind `kind`.
    """
    manifest = sound_manifest(checkpoint)
    if kind == WEIGHTS:
        return manifest
    try:
        return manifest.as_weights(kind)
    except InputError as error:
        raise InputError(f"checkpoint {checkpoint}: {error}") from None


def open_model(path: Path, kind: str = WEIGHTS) -> StoredModel:
    """Return the newest complete checkpoint at `path`, with its config.toml.

    `path` is a run directory, a converted model or a checkpoint. `kind` selects the stored values
    that are used as weights: the trained weights, or the moving average of the weights. Raise
    InputError if there is no complete checkpoint, or if it cannot be used as a model.
    """
    checkpoint = examine.newest(path)
    manifest = manifest_of(checkpoint, kind)
    require_kind(checkpoint, manifest.said)
    if manifest.find(key(WEIGHTS, TIED_NAME)) is None:
        raise InputError(f"checkpoint {checkpoint} holds no {key(WEIGHTS, TIED_NAME)}")
    places = (path, checkpoint.parent.parent, checkpoint)
    folder = next((place for place in places if (place / CONFIG).is_file()), None)
    if folder is None:
        raise InputError(
            f"no {CONFIG} in {checkpoint.parent.parent}: it has the shape of the model, and is in "
            "every run directory"
        )
    try:
        tree = tables_of(read_file(folder / CONFIG))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG}: {error}") from None
    if not isinstance(tree.get("model"), dict):
        raise InputError(f"{folder / CONFIG} has no section [model]")
    # config.toml has the section [model] of the run's last start. The checkpoint has the section
    # [model] with which its weights were trained. So the section in the checkpoint is used if it
    # exists.
    model = manifest.said["model"] or tree["model"]
    return StoredModel(folder, checkpoint, {**tree, "model": model}, manifest)


@dataclass(frozen=True)
class StoredAdapter:
    """Adapters on the disk: their checkpoint, and their description in its manifest."""

    checkpoint: Path
    adapted: Adapted
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Return the run directory, or the directory of imported adapters."""
        return self.checkpoint.parent.parent

    def over(self, stored: StoredModel, config: Config) -> Config:
        """Return `config`, the configuration of the base model `stored`, extended by the adapters.

        If the adapters have a head for a task, the configuration also gets this head, and the
        sequence length with which the head was trained. Raise InputError if the adapters were
        trained on another base model.
        """
        self.adapted.require(
            self.checkpoint, Base(str(stored.checkpoint), fingerprint(stored.manifest))
        )
        update: dict[str, Any] = {"adapt": self.adapted.adapt}
        if self.adapted.has_head:
            update |= {"task": self.adapted.task, "model": self.model}
        return config.model_copy(update=update).adapted()

    @property
    def trained_on(self) -> TrainedOn | None:
        """Return the data that the adapters were trained on; None if another program wrote the
        adapters.

        Raise InputError for a damaged manifest.
        """
        return Before.of(self.checkpoint, self.manifest.said).trained_on

    @property
    def datasets(self) -> list[str]:
        """Return the paths of the shards that the adapters were last trained on. The list is empty
        if the adapters have a head for a task, because they were then trained on task files."""
        if self.adapted.has_head:
            return []
        known = self.trained_on
        if known is None:
            return []
        return [source.path for source in known.last.sources]

    @property
    def model(self) -> ModelConfig:
        """Return the shape of the base model for which the adapters were trained, with the
        adapters' head."""
        return ModelConfig.model_validate(self.manifest.said["model"])


def open_adapter(path: Path, kind: str = WEIGHTS) -> StoredAdapter:
    """Return the adapters in the newest complete checkpoint at `path`.

    `kind` selects the stored values that are used as weights of the adapters: the trained weights,
    or the moving average of the weights. Raise InputError if the checkpoint has no adapters, or no
    state of the kind `kind`.
    """
    checkpoint = examine.newest(path)
    manifest = manifest_of(checkpoint, kind)
    adapted = adapted_of(checkpoint, manifest.said)
    if adapted is None:
        raise InputError(
            f"checkpoint {checkpoint} is a complete model, not adapters; legal: give it as RUN"
        )
    return StoredAdapter(checkpoint, adapted, manifest)


def config_of(
    model: Mapping[str, Any],
    ranks: int = 1,
    precision: str = "fp32",
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int | None = None,
) -> Config:
    """Return a configuration for using a model without training. `model` has the keys of the
    section [model].

    If `data` is None, the data-parallel size is chosen so that all `ranks` are used. Raise
    InputError if the model or the layout is not legal.
    """
    if data is None:
        data = max(1, ranks // (tensor * pipeline))
    layout = Layout(tensor, pipeline, data)
    return synthetic_config(layout, model, ranks, precision={"compute": precision})


def declarations(config: Config, vocab_size: int) -> dict[str, Declaration]:
    """Return the declaration of every parameter by its logical name, without allocating memory."""
    stage = Stage(config, vocab_size, range(config.model.layers), TensorAxis(OneRank()))
    return {name: weight.declaration for name, weight in stage.named_logical_parameters()}


def loaded_layer(
    config: Config, vocab_size: int, layer: int, reader: Reader
) -> tuple[Stage, ParameterBuffer]:
    """Return one layer of a model on the host, and the buffer that contains its weights.

    The first layer also has the embedding, and the last layer the head. `config` must have the
    precision fp32 or fp64. Raise Damaged if the checkpoint is damaged.
    """
    stage = Stage(config, vocab_size, range(layer, layer + 1), TensorAxis(OneRank()))
    host = torch.device("cpu")
    precision = data_types(config.precision.compute)
    named = stage.named_logical_parameters()
    buffer = ParameterBuffer(named, precision, host, Portion(), trains=False)
    for name, entry in buffer.entries.items():
        reader.read_whole(key(WEIGHTS, name), entry.view(buffer.weights).numpy())
    stage.place_tables(config.model, host)
    return stage, buffer


def require_weights(reader: Reader, needed: Mapping[str, Declaration]) -> None:
    """Raise InputError unless the checkpoint has exactly the weights `needed`, in their declared
    shapes. The checkpoint may also have modules for multi-token prediction, which adapters and
    heads for tasks do not use."""
    for name, declaration in needed.items():
        reader.require(key(WEIGHTS, name), declaration.shape)
    known = {key(WEIGHTS, name) for name in needed}
    prefix = key(WEIGHTS, "")
    unused = key(WEIGHTS, f"{MODULES}.")
    extra = [
        name
        for name in reader.manifest.names
        if name.startswith(prefix) and not name.startswith(unused) and name not in known
    ]
    if extra:
        raise InputError(
            f"checkpoint {reader.directory}: {extra[0]} is not a tensor of the model in its "
            f"{CONFIG}"
        )
