"""The classes of a configuration's sections, with the type and the default of each key."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ptdmpi.base.plugins import plugin
from ptdmpi.base.words import mistake_in_path
from ptdmpi.config.choices import (
    ContextMethod,
    OffloadName,
    RecomputeMode,
    ScheduleName,
    default_schedule,
)
from ptdmpi.config.model import MASK_FRACTION
from ptdmpi.config.precision import PRECISIONS, PrecisionName, Scaling, ScalingName, scaling_of
from ptdmpi.config.section import (
    MOST_BATCH,
    MOST_THREADS,
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

# The name of the kind of state that contains the weights. In a training run these are the master
# weights.
WEIGHTS = "weights"
AVERAGE = "ema"  # the kind of state that contains the moving average of the weights.
# Kinds of state that optimizers keep, with the names that torch uses.
MOMENTUM, ADAMW_KEEPS = "momentum_buffer", ("exp_avg", "exp_avg_sq")
LION_BETA2 = 0.99
MUON_MOMENTUM = 0.95


KernelFile = Annotated[PathText, Field(pattern=r"\.toml$")]


class RunConfig(Section):
    """The section [run]: the name of the run, its number of steps, the random seed, and further
    options.
    """

    name: Free[RunName] = "run"
    dir: Free[PathText] = ""
    seed: BoundOrder[Annotated[int, Field(ge=0)]] = 1234
    steps: Reported[Positive]
    threads: Reported[Annotated[int, Field(ge=1, le=MOST_THREADS)]] = 1
    reproducible: Reported[bool] = False
    compile: Reported[bool | Literal["auto"]] = "auto"
    loss: Reported[str] = ""
    kernels: Free[Literal["kept", "anew", "auto", "default"] | KernelFile] = "kept"
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
        """Return the steps that are profiled, counted from 1. The result is empty if no step is
        profiled."""
        first, _, last = self.profile_steps.partition(":")
        if not first:
            return range(0)
        return range(int(first), int(last) + 1)

    @model_validator(mode="before")
    @classmethod
    def _default_dir(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("dir"):
            name = str(values.get("name", "run"))
            # if the name is illegal, use the legal directory "runs", so that the mistake is
            # reported only for the key `name` and not also for `dir`
            return {**values, "dir": "runs" if mistake_in_path(name) else f"runs/{name}"}
        return values


class ParallelConfig(Section):
    """The section [parallel]: the sizes of the tensor, context, pipeline and data axes, and the
    pipeline schedule. `expert` is the number of ranks over which experts are distributed, and
    `expert_tensor` is the number of tensor ranks that divide an expert. `zero` is the stage of
    ZeRO, which shards state over groups of `shard_group` ranks. `offload` moves the optimizer's
    state off the device.
    """

    tensor: Reported[Positive] = 1
    context: Reported[Positive] = 1
    context_method: Reported[ContextMethod] = "all_gather"
    expert: Reported[Positive] = 1
    expert_tensor: Reported[Positive | Literal["all"]] = "all"
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
        """Return the number of ranks that compute one sample together: the product of the tensor,
        context and pipeline axes.
        """
        return self.tensor * self.context * self.pipeline

    @model_validator(mode="before")
    @classmethod
    def _default_schedule(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "schedule" not in values:
            virtual = values.get("virtual", 1)
            return {**values, "schedule": default_schedule(1 if virtual is None else virtual)}
        return values


class BatchConfig(Section):
    """The section [batch]: the number of sequences per optimizer step over all ranks, and per
    microbatch.
    """

    global_size: BoundOrder[Annotated[int, Field(ge=1, le=MOST_BATCH)]]
    micro_size: Reported[Positive] = 1


class PrecisionConfig(Section):
    """The section [precision]: the type of weights and activations. Master weights and gradients
    are float32, or float64 for fp64. `fp8` says which numbers share a scale if `compute` is "fp8".
    """

    compute: Reported[PrecisionName] = "fp32"
    fp8: Reported[ScalingName] = "block"
    initial_loss_scale: Reported[Annotated[float, Field(ge=1)]] = 65536.0
    loss_scale_window: Reported[Positive] = 1000

    @property
    def scales_loss(self) -> bool:
        """Return True if the loss is multiplied by a scale, because small gradients would underflow
        in the type `compute`.
        """
        return PRECISIONS[self.compute].scales_loss

    @property
    def scaling(self) -> Scaling:
        """Return which numbers share a scale in the matrix products of linear layers; "none" if
        these products need no scales."""
        return scaling_of(self.compute, self.fp8)


class RecomputeConfig(Section):
    """The section [recompute]: which activations are freed after the forward pass and computed
    again for the backward pass. Full recomputation keeps only the inputs of layers; with
    `partition_activations` each tensor rank keeps only a part of each input.
    """

    mode: Reported[RecomputeMode] = "none"
    layers: Reported[Positive | Literal["all"]] = "all"
    partition_activations: Reported[bool] = False


class RateGroup(Section):
    """A group of parameters with their own learning rate and weight decay. `names` are globs for
    the names of these parameters (`layers.*.mlp.*`, `*.bias`). The learning rate and the weight
    decay of these parameters are the values in [optimizer] times the two factors.
    """

    names: Reported[Annotated[tuple[FileName, ...], Field(min_length=1, strict=False)]]
    learning_rate_factor: Reported[Annotated[float, Field(ge=0)]] = 1.0
    weight_decay_factor: Reported[Annotated[float, Field(ge=0)]] = 1.0


class OptimizerConfig(Section):
    """The section [optimizer]: the optimizer, the warm-up and decay of its learning rate, and
    gradient clipping. The optimizers are AdamW (Loshchilov and Hutter 2019), Lion (Chen et al.
    2023), SGD with momentum, and Muon (Jordan et al. 2024). With `kind = "muon"`, Muon updates the
    layers' matrices, and AdamW updates all other parameters. With `decay = "wsd"` (warm-up, stable,
    decay) the learning rate falls in the last `decay_steps` steps of a run. A `decay_steps` below 1
    is a fraction of all steps. `muon_scale` says how Muon scales an orthogonal update; its values
    are named as in torch.optim.Muon. If `ema_decay` is above 0, the run keeps a moving average of
    the weights. `kind = "own"` selects the optimizer that `own` names.
    """

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
        """Return the kinds of state that the optimizer keeps for a parameter, with the names that
        torch uses. If the run keeps a moving average of the weights, the last kind is this moving
        average. With Muon, no parameter has all kinds: the momentum exists only for the layers'
        matrices, and the two moments of AdamW exist only for all other parameters.
        """
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
    def has_one_pass(self) -> bool:
        """Return True if a kernel in Triton can do the complete update of this optimizer
        (`model/kernels/fused/update.py`)."""
        return self.kind == "adamw"

    @property
    def has_matrices(self) -> bool:
        """Return True if the optimizer can update a matrix of a layer only if it has the complete
        matrix, as Muon does.
        """
        return self.kind == "muon"

    @property
    def numbers(self) -> int:
        """Return how many numbers of optimizer state are stored for each element of a parameter.
        With Muon the result holds for the parameters that AdamW updates. An element of a layer's
        matrix has one number less.
        """
        return len(self.moments) - self.has_matrices

    def last_steps(self, steps: int) -> int:
        """Return how many of the last steps of a run reduce the learning rate if `decay = "wsd"`;
        at least one. The run has `steps` steps.
        """
        if isinstance(self.decay_steps, int):
            return self.decay_steps
        return max(1, round(self.decay_steps * steps))

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_kind(cls, values: Any) -> Any:
        # The default of Lion's paper (Chen et al. 2023, arXiv 2302.06675, section 3.2). The general
        # default 0.95 is meant for AdamW.
        if isinstance(values, Mapping) and values.get("kind") == "lion":
            return {"beta2": LION_BETA2, **values}
        # the default values of torch.optim.Muon, which Jordan et al. 2024 also use
        if isinstance(values, Mapping) and values.get("kind") == "muon":
            return {"momentum": MUON_MOMENTUM, "nesterov": True, **values}
        return values


class TrainDataConfig(Section):
    """One training dataset of the mixture: the directory of its shards, its weight, and the maximum
    number of epochs.
    """

    path: Free[DirectoryName]
    weight: BoundOrder[Decimal] = Field(default=Decimal(1), gt=0, le=10**9, strict=False)
    epochs: Free[Decimal | None] = Field(default=None, gt=0, le=10**9, strict=False)

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, values: Any) -> Any:
        # The TOML parser returns binary floats. The shortest decimal form of such a float is the
        # number that the user wrote, so read the Decimal from this form.
        if isinstance(values, Mapping):
            return {k: str(v) if isinstance(v, float) else v for k, v in values.items()}
        return values


class DataConfig(Section):
    """The section [data]: the token shards, or the user's own datasets, and the order of their
    samples.
    """

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
        """Return the paths of the validation datasets; the result may be empty."""
        if self.valid is None:
            return ()
        if isinstance(self.valid, str):
            return (self.valid,)
        return self.valid


class TaskConfig(Section):
    """The section [task]: the task for which a head is trained. With a task, `data.train` and
    `data.valid` are files of JSON lines. Each line is a text with one of the `labels`, or a
    question with `choices` candidate answers. Each candidate becomes one sequence. The section also
    determines the model's head (`Config.with_head`).
    """

    kind: Bound[Literal["none", "classification", "choice"]] = "none"
    labels: Bound[Annotated[tuple[FileName, ...], Field(strict=False)]] = ()
    choices: Bound[NonNegative] = 0
    tokenizer: Reported[PathText] = ""

    @property
    def sequences(self) -> int:
        """Return the number of sequences in one sample."""
        return self.choices if self.kind == "choice" else 1

    @property
    def classes(self) -> int:
        """Return the number of scores that the head computes for one sequence."""
        return 1 if self.kind == "choice" else len(self.labels)


class PreferenceConfig(Section):
    """The section [preference]: training on pairs of answers, one of which is preferred, by direct
    preference optimization (Rafailov et al. 2023, arXiv 2305.18290). `label_smoothing` is the
    fraction of pairs that are assumed to be in the wrong order (Mitchell 2023)."""

    method: Bound[Literal["none", "dpo"]] = "none"
    beta: Reported[Annotated[float, Field(gt=0)]] = 0.1
    label_smoothing: Reported[Annotated[float, Field(ge=0, lt=0.5)]] = 0.0

    @property
    def compares(self) -> bool:
        """Return True if the loss compares pairs of answers."""
        return self.method != "none"


class DistillationConfig(Section):
    """The section [distillation]: training on the stored outputs of a teacher model (Hinton et al.
    2015, arXiv 1503.02531), in addition to the labels. With `weight = 0` no teacher is used."""

    weight: Reported[Annotated[float, Field(ge=0)]] = 0.0

    @property
    def teaches(self) -> bool:
        """Return True if the run uses a teacher's outputs."""
        return self.weight > 0


class CheckpointConfig(Section):
    """The section [checkpoint]. A run saves checkpoints at its end, every `every_steps` steps and
    every `every_minutes` minutes. If one of these two keys is 0, the run does not save at this
    interval. The run keeps the newest `keep` checkpoints (0: all), the checkpoints at multiples of
    `keep_every` steps, and the `keep_best` checkpoints with the lowest validation losses (true
    means 1).
    """

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
    """The section [log]. A run with validation data validates every `validate_every_steps` steps
    and at its end. With `validate_every_steps = 0`, the run validates only at its end. `tasks` are
    files of questions, as for `ptdmpi evaluate --tasks`. With `tasks_every_steps = 0`, the
    questions are evaluated only at the end. `tensorboard`, `wandb` (true means offline) and
    `mlflow` need the extras of the same names. `notify` are the receivers of messages about the
    run: "env:NAME" for the web address in the environment variable NAME, or "mailto:ADDRESS".
    """

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
    mlflow: Free[bool] = False
    mlflow_experiment: Free[Annotated[str, Field(min_length=1)]] = "ptdmpi"
    notify: Free[Annotated[tuple[str, ...], Field(strict=False)]] = ()

    @property
    def most_validated(self) -> int | None:
        """Return the maximum number of samples that a validation uses from each dataset; None means
        all samples.
        """
        return None if self.validate_samples == "all" else self.validate_samples

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, values: Any) -> Any:
        # Convert a single receiver to a list, so that the rule about lists of receivers also checks
        # this receiver. Otherwise pydantic would report a wrong type, and the error message would
        # contain the receiver, which may be a secret web address.
        if isinstance(values, Mapping) and isinstance(values.get("notify"), str):
            return {**values, "notify": (values["notify"],)}
        return values


class CommConfig(Section):
    """The section [comm]: the transport between ranks. `ptdmpi.config.wires` checks the value of
    `wire`.
    """

    wire: Reported[str] = AUTO
