"""The sections of a configuration: typed and frozen, each key with its default."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ptdmpi.base.plugins import plugin
from ptdmpi.config.choices import (
    ContextMethod,
    OffloadName,
    RecomputeMode,
    ScheduleName,
    default_schedule,
)
from ptdmpi.config.model import MASK_FRACTION
from ptdmpi.config.precision import PRECISIONS, PrecisionName
from ptdmpi.config.section import (
    MOST_BATCH,
    Bound,
    BoundOrder,
    DirectoryName,
    FileName,
    Fraction,
    Free,
    NonNegative,
    PathText,
    Positive,
    Reported,
    RunName,
    Section,
)
from ptdmpi.config.wires import AUTO

# The kind of state of the master weights; in a model that does not train, of the weights.
WEIGHTS = "weights"
AVERAGE = "ema"  # the kind of state that is the weights' moving average
# Kinds of state that optimizers keep, by torch's names.
MOMENTUM, ADAMW_KEEPS = "momentum_buffer", ("exp_avg", "exp_avg_sq")
LION_BETA2 = 0.99
MUON_MOMENTUM = 0.95


class RunConfig(Section):
    """Which run this is, how long it goes, and the seed of all its randomness."""

    name: Free[RunName] = "run"
    dir: Free[PathText] = ""
    seed: BoundOrder[Annotated[int, Field(ge=0)]] = 1234
    steps: Reported[Positive]
    threads: Reported[Annotated[int, Field(ge=1, le=1024)]] = 1
    reproducible: Reported[bool] = False
    compile: Reported[bool] = False
    loss: Reported[str] = ""
    kernels: Free[Literal["kept", "anew"]] = "kept"
    max_minutes: Free[Annotated[float, Field(ge=0)]] = 0.0
    stall_s: Free[Annotated[float, Field(ge=0)]] = 600.0
    max_skips: Free[NonNegative] = 3
    stop_after_worse: Free[NonNegative] = 0
    on_failure: Free[Literal["abort", "shrink"]] = "abort"
    spare_ranks: Free[NonNegative] = 0
    verify_every: Free[NonNegative] = 0
    on_corruption: Free[Literal["stop", "restart"]] = "stop"
    cluster: Free[PathText] = ""
    profile_steps: Free[Annotated[str, Field(pattern=r"^([1-9]\d{0,11}:[1-9]\d{0,11})?$")]] = ""
    profile_ranks: Free[
        Annotated[tuple[NonNegative, ...], Field(min_length=1, strict=False)] | Literal["all"]
    ] = (0,)

    @property
    def profiled(self) -> range:
        """Return the steps (from 1) that are profiled, perhaps none."""
        first, _, last = self.profile_steps.partition(":")
        if not first:
            return range(0)
        return range(int(first), int(last) + 1)

    @model_validator(mode="before")
    @classmethod
    def _default_dir(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("dir"):
            return {**values, "dir": f"runs/{values.get('name', 'run')}"}
        return values


class ParallelConfig(Section):
    """Sizes of the tensor, context, pipeline and data axes, how many ranks have different experts,
    how the pipeline is run, and which state is sharded in groups of `shard_group` ranks (`zero`) or
    kept off the device (`offload`)."""

    tensor: Reported[Positive] = 1
    context: Reported[Positive] = 1
    context_method: Reported[ContextMethod] = "all_gather"
    expert: Reported[Positive] = 1
    pipeline: Reported[Positive] = 1
    virtual: Reported[Positive] = 1
    data: Reported[Positive | Literal["auto"]] = "auto"
    schedule: Reported[ScheduleName] = "1f1b"
    first_layers: Reported[Positive | Literal["auto"]] = "auto"
    sequence_parallel: Reported[bool] = False
    scatter_gather: Reported[bool] = True
    zero: Reported[Annotated[int, Field(ge=0, le=3)]] = 0
    shard_group: Reported[Positive | Literal["all", "node"]] = "all"
    offload: Reported[OffloadName] = "none"

    @property
    def model_ranks(self) -> int:
        """Return t c p, the ranks that compute one sample together."""
        return self.tensor * self.context * self.pipeline

    @model_validator(mode="before")
    @classmethod
    def _default_schedule(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "schedule" not in values:
            virtual = values.get("virtual", 1)
            return {**values, "schedule": default_schedule(1 if virtual is None else virtual)}
        return values


class BatchConfig(Section):
    """Sequences per optimizer step over all ranks, and per microbatch."""

    global_size: BoundOrder[Annotated[int, Field(ge=1, le=MOST_BATCH)]]
    micro_size: Reported[Positive] = 1


class PrecisionConfig(Section):
    """Type of weights and activations; masters and gradients are float32 (fp64: float64)."""

    compute: Reported[PrecisionName] = "fp32"
    initial_loss_scale: Reported[Annotated[float, Field(ge=1)]] = 65536.0
    loss_scale_window: Reported[Positive] = 1000

    @property
    def scales_loss(self) -> bool:
        """Return True if small gradients would vanish in the type, so that the loss is scaled."""
        return PRECISIONS[self.compute].scales_loss


class RecomputeConfig(Section):
    """Which activations are dropped after the forward pass and computed again for the backward, and
    whether those that full recomputation keeps are divided over the tensor axis."""

    mode: Reported[RecomputeMode] = "none"
    layers: Reported[Positive | Literal["all"]] = "all"
    partition_activations: Reported[bool] = False


class RateGroup(Section):
    """Parameters whose learning rate and weight decay are other ones: `names` are globs of logical
    names (`layers.*.mlp.*`, `*.bias`), and both factors multiply what the optimizer says."""

    names: Reported[Annotated[tuple[FileName, ...], Field(min_length=1, strict=False)]]
    learning_rate_factor: Reported[Annotated[float, Field(ge=0)]] = 1.0
    weight_decay_factor: Reported[Annotated[float, Field(ge=0)]] = 1.0


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023), SGD with momentum, or Muon on
    the layers' matrices with AdamW on the rest (Jordan et al. 2024); warm-up, decay and clipping.
    `decay_steps`: how many steps `decay = "wsd"` ends with, or which share of all. `muon_scale`:
    how long an orthogonal update is, by torch.optim.Muon's names. `ema_decay` above 0: the state
    has the weights' moving average, too. `kind = "own"`: the optimizer that `own` names."""

    kind: Reported[Literal["adamw", "sgd", "lion", "muon", "own"]] = "adamw"
    own: Reported[str] = ""
    learning_rate: Reported[Annotated[float, Field(gt=0)]] = 3e-4
    min_learning_rate: Reported[Annotated[float, Field(ge=0)]] = 0.0
    warmup_steps: Reported[NonNegative] = 0
    decay: Reported[Literal["cosine", "linear", "constant", "wsd"]] = "cosine"
    decay_steps: Reported[Positive | Annotated[float, Field(gt=0, lt=1)]] = 0.1
    beta1: Reported[Fraction] = 0.9
    beta2: Reported[Fraction] = 0.95
    eps: Reported[Annotated[float, Field(gt=0)]] = 1e-8
    momentum: Reported[Fraction] = 0.0
    nesterov: Reported[bool] = False
    muon_scale: Reported[Literal["match_rms_adamw", "original"]] = "match_rms_adamw"
    weight_decay: Reported[Annotated[float, Field(ge=0)]] = 0.1
    clip_norm: Reported[Annotated[float, Field(ge=0)]] = 1.0
    ema_decay: Reported[Fraction] = 0.0
    groups: Reported[Annotated[tuple[RateGroup, ...], Field(strict=False)]] = ()

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the state of parameters in addition to their weights, by torch's names. The
        weights' moving average, if there is one, is last. For the layers' matrices Muon keeps only
        the first kind; for all other parameters it keeps the same as AdamW."""
        kept = self._moments_of_kind()
        if self.ema_decay:
            return (*kept, AVERAGE)
        return kept

    def _moments_of_kind(self) -> tuple[str, ...]:
        match self.kind:
            case "muon":
                return (MOMENTUM, *ADAMW_KEEPS)
            case "adamw":
                return ADAMW_KEEPS
            case "sgd" if self.momentum:
                return (MOMENTUM,)
            case "sgd":
                return ()
            case "own":
                return tuple(plugin("optimizers", self.own).moments)
        return ("exp_avg",)

    @property
    def has_matrices(self) -> bool:
        """Return True if each of the layers' matrices is updated as a whole."""
        return self.kind == "muon"

    @property
    def numbers(self) -> int:
        """Return the numbers of state per element of a parameter, without its weight. Under Muon an
        element of the layers' matrices has one less."""
        return len(self.moments) - self.has_matrices

    def last_steps(self, steps: int) -> int:
        """Return the number of last steps, out of `steps`, in which `decay = "wsd"` decays; at
        least one."""
        if isinstance(self.decay_steps, int):
            return self.decay_steps
        return max(1, round(self.decay_steps * steps))

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_kind(cls, values: Any) -> Any:
        # Lion's own default (Chen et al. 2023, arXiv 2302.06675, section 3.2); 0.95 is for AdamW
        if isinstance(values, Mapping) and values.get("kind") == "lion":
            return {"beta2": LION_BETA2, **values}
        # the defaults of torch.optim.Muon, which are those of Jordan et al. 2024
        if isinstance(values, Mapping) and values.get("kind") == "muon":
            return {"momentum": MUON_MOMENTUM, "nesterov": True, **values}
        return values


class TrainDataConfig(Section):
    """One dataset of the mixture: a directory of shards, its share, how often it may be seen."""

    path: Free[DirectoryName]
    weight: BoundOrder[Decimal] = Field(default=Decimal(1), gt=0, le=10**9, strict=False)
    epochs: Free[Decimal | None] = Field(default=None, gt=0, le=10**9, strict=False)

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, values: Any) -> Any:
        # TOML gives binary floats; their shortest decimal form is what the user wrote.
        if isinstance(values, Mapping):
            return {k: str(v) if isinstance(v, float) else v for k, v in values.items()}
        return values


class DataConfig(Section):
    """The `[data]` section: the token shards, or the data of the user's own, and their order."""

    train: BoundOrder[Annotated[tuple[TrainDataConfig, ...], Field(min_length=1, strict=False)]]
    valid: Reported[
        DirectoryName
        | Annotated[tuple[DirectoryName, ...], Field(min_length=1, strict=False)]
        | None
    ] = None
    tokenizer_sha256: Free[str | None] = None
    document_boundaries: Reported[bool] = False
    mask_fraction: Reported[Annotated[float, Field(gt=0, lt=1)]] = MASK_FRACTION
    mask_ngram: Reported[Positive] = 3
    whole_words: Reported[bool] = True
    reader: Free[Literal["mmap", "pread"]] = "mmap"
    verify: Free[Literal["read", "start", "off"]] = "read"
    change: Free[Literal["refuse", "from here"]] = "refuse"
    split: BoundOrder[Literal["shared", "by_rank"]] = "shared"

    @property
    def valid_paths(self) -> tuple[str, ...]:
        """Return the validation datasets, perhaps none."""
        if self.valid is None:
            return ()
        if isinstance(self.valid, str):
            return (self.valid,)
        return self.valid


class TaskConfig(Section):
    """The data that a head for a task is trained on: `data.train` and `data.valid` are then JSON
    lines, of texts with one of `labels`, or of questions with `choices` candidates each, which are
    as many sequences. The model's head follows from it (`Config.with_head`)."""

    kind: Bound[Literal["none", "classification", "choice"]] = "none"
    labels: Bound[Annotated[tuple[FileName, ...], Field(strict=False)]] = ()
    choices: Bound[NonNegative] = 0
    tokenizer: Reported[str] = ""

    @property
    def sequences(self) -> int:
        """Return the sequences of one sample."""
        return self.choices if self.kind == "choice" else 1

    @property
    def classes(self) -> int:
        """Return the number of scores of one sequence."""
        return 1 if self.kind == "choice" else len(self.labels)


class PreferenceConfig(Section):
    """Training on pairs of answers, of which one is preferred: direct preference optimization
    (Rafailov et al. 2023, arXiv 2305.18290), with `label_smoothing` the share of pairs that are
    assumed to be in the wrong order (Mitchell 2023)."""

    method: Bound[Literal["none", "dpo"]] = "none"
    beta: Reported[Annotated[float, Field(gt=0)]] = 0.1
    label_smoothing: Reported[Annotated[float, Field(ge=0, lt=0.5)]] = 0.0

    @property
    def compares(self) -> bool:
        """Return True if the loss is of pairs."""
        return self.method != "none"


class CheckpointConfig(Section):
    """Besides at the end, a run saves every `every_steps` steps and `every_minutes` minutes, 0:
    never; `keep = 0` keeps every checkpoint, and `keep_every` those at its multiples besides the
    newest ones; `keep_best` (true: 1) those of so many lowest validation losses."""

    every_steps: Free[NonNegative] = 0
    every_minutes: Free[Annotated[float, Field(ge=0)]] = 15.0
    memory_every_steps: Free[NonNegative] = 0
    keep: Free[NonNegative] = 2
    keep_every: Free[NonNegative] = 0
    keep_best: Free[bool | NonNegative] = 0
    asynchronous: Free[bool] = False
    resume: Free[PathText] = "auto"
    initial: Free[PathText | None] = None


class LogConfig(Section):
    """`validate_every_steps = 0` validates at the end only, where validation data is given, and so
    do `tasks_every_steps = 0` and `tasks`, files of questions as `ptdmpi evaluate --tasks` has.
    `tensorboard` and `wandb` (true: offline) need the extras of these names."""

    every_steps: Free[Positive] = 1
    validate_every_steps: Free[NonNegative] = 0
    validate_samples: Free[Positive | Literal["all"]] = "all"
    bigram_baseline: Free[bool] = False
    gradient_noise_every_steps: Free[NonNegative] = 0
    tasks: Free[Annotated[tuple[FileName, ...], Field(strict=False)]] = ()
    tasks_every_steps: Free[NonNegative] = 0
    tensorboard: Free[bool] = False
    wandb: Free[bool | Literal["offline", "online"]] = False
    wandb_project: Free[str] = "ptdmpi"

    @property
    def most_validated(self) -> int | None:
        """Return the maximal number of samples of a validation dataset; None: all."""
        return None if self.validate_samples == "all" else self.validate_samples


class CommConfig(Section):
    """`wire` is checked by `ptdmpi.config.wires`, which knows the reasons too."""

    wire: Reported[str] = AUTO
