"""The sections of a configuration: typed and frozen, each key with its default."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ptdmpi.config.wires import AUTO

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
DirectoryName = Annotated[str, Field(min_length=1)]  # an empty one would mean the directory here


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """Which run this is, how long it goes, and the seed of all its randomness."""

    name: str = "run"
    dir: str = ""
    seed: NonNegative = 1234
    steps: Positive
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    reproducible: bool = False
    max_minutes: Annotated[float, Field(ge=0)] = 0.0
    stall_s: Annotated[float, Field(ge=0)] = 600.0
    max_skips: NonNegative = 3
    on_failure: Literal["abort", "shrink"] = "abort"
    spare_ranks: NonNegative = 0
    cluster: str = ""

    @model_validator(mode="before")
    @classmethod
    def _default_dir(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("dir"):
            return {**values, "dir": f"runs/{values.get('name', 'run')}"}
        return values


# What each kind of model means; a key given explicitly wins over its kind.
_DECODER = {
    "attention": "causal",
    "block_norm": "pre",
    "embedding_norm": False,
    "output_head": "linear",
    "token_types": 0,
    "sentence_order": False,
    "norm_eps": 1e-5,
}
MODEL_KINDS: dict[str, dict[str, Any]] = {
    "gpt": {
        **_DECODER,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": True,
    },
    "llama": {
        **_DECODER,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": False,
        "tie_embeddings": False,
    },
    # Devlin et al. 2019 (arXiv 1810.04805), with the sentence order of Lan et al. 2020
    "bert": {
        "norm": "layernorm",
        "activation": "gelu_exact",
        "positions": "learned",
        "bias": True,
        "tie_embeddings": True,
        "attention": "bidirectional",
        "block_norm": "post",
        "embedding_norm": True,
        "output_head": "mlm",
        "token_types": 2,
        "sentence_order": True,
        "norm_eps": 1e-12,
    },
}


MASK_FRACTION = 0.15  # Devlin et al. 2019, section 3.1


class ModelConfig(Section):
    """The shape of the transformer: l layers of width h with a heads, on sequences of s tokens."""

    kind: Literal["gpt", "llama", "bert"] = "gpt"
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    ffn_hidden: Positive
    seq_length: Positive
    norm: Literal["layernorm", "rmsnorm"]
    activation: Literal["gelu", "gelu_exact", "swiglu"]
    positions: Literal["learned", "rope"]
    bias: bool | Literal["attention", "mlp"]
    tie_embeddings: bool
    attention: Literal["causal", "bidirectional"]
    block_norm: Literal["pre", "post"]
    embedding_norm: bool
    output_head: Literal["linear", "mlm"]
    token_types: NonNegative
    sentence_order: bool
    norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    init_std: Annotated[float, Field(gt=0)] = 0.02

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kind = values.get("kind", "gpt")
        known = isinstance(kind, str) and kind in MODEL_KINDS
        # A wrong value is told of as such, not by the keys that depend on it: any stands in.
        filled = {**MODEL_KINDS[kind if known else "gpt"], **values}
        heads, hidden = filled.get("heads"), filled.get("hidden")
        filled.setdefault("kv_heads", heads if type(heads) is int and heads > 0 else 1)
        if "ffn_hidden" not in filled:
            sound = type(hidden) is int and hidden > 0
            filled["ffn_hidden"] = default_ffn_hidden(filled) if sound else 1
        return filled

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def attention_bias(self) -> bool:
        return self.bias in (True, "attention")

    @property
    def mlp_bias(self) -> bool:
        return self.bias in (True, "mlp")

    @property
    def head_bias(self) -> bool:
        """Of a masked model's heads."""
        return self.bias is True

    @property
    def masked(self) -> bool:
        """Trained on masked tokens: what sees both sides of a token cannot be asked for the
        next."""
        return self.attention == "bidirectional"

    @property
    def text_length(self) -> int:
        """Tokens of text in a sample: of a masked model's without the special ones in front,
        between and behind."""
        special = 3 if self.sentence_order else 2
        return self.seq_length - special if self.masked else self.seq_length

    def predictions(self, mask_fraction: float = MASK_FRACTION) -> int:
        """Positions of a sample whose tokens are asked for, at most."""
        if not self.masked:
            return self.seq_length
        return max(1, round(mask_fraction * self.text_length))


def default_ffn_hidden(model: Mapping[str, Any]) -> int:
    """4 h; gated: 8/3 h, rounded up to a multiple of 256 (LLaMA, arXiv 2302.13971, sec. 2.2)."""
    hidden = model["hidden"]
    if model.get("activation") == "swiglu":
        return -(-8 * hidden // 3 // 256) * 256
    return 4 * hidden


class ParallelConfig(Section):
    """Sizes of the tensor, pipeline and data axes, and how the pipeline is run."""

    tensor: Positive = 1
    pipeline: Positive = 1
    virtual: Positive = 1
    data: Positive | Literal["auto"] = "auto"
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    sequence_parallel: bool = False
    scatter_gather: bool = True

    @model_validator(mode="before")
    @classmethod
    def _default_schedule(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "schedule" not in values:
            interleaved = values.get("virtual", 1) not in (1, None)
            return {**values, "schedule": "interleaved" if interleaved else "1f1b"}
        return values


class BatchConfig(Section):
    """Sequences per optimizer step over all ranks, and per microbatch."""

    global_size: Positive
    micro_size: Positive = 1


class PrecisionConfig(Section):
    """Type of weights and activations; masters and gradients are float32 (fp64: float64)."""

    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "fp32"
    initial_loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    loss_scale_window: Positive = 1000


class RecomputeConfig(Section):
    """Which activations are dropped after the forward pass and computed again for the backward."""

    mode: Literal["none", "selective", "full"] = "none"
    layers: Positive | Literal["all"] = "all"


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019), warm-up, decay and clipping."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(ge=0)] = 1.0


class TrainDataConfig(Section):
    """One dataset of the mixture: a directory of shards, its share, how often it may be seen."""

    path: DirectoryName
    weight: Decimal = Field(default=Decimal(1), gt=0, le=10**9, strict=False)
    epochs: Decimal | None = Field(default=None, gt=0, le=10**9, strict=False)

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, values: Any) -> Any:
        # TOML gives binary floats; their shortest decimal form is what the user wrote.
        if isinstance(values, Mapping):
            return {k: str(v) if isinstance(v, float) else v for k, v in values.items()}
        return values


class DataConfig(Section):
    train: Annotated[tuple[TrainDataConfig, ...], Field(min_length=1, strict=False)]
    valid: (
        DirectoryName
        | Annotated[tuple[DirectoryName, ...], Field(min_length=1, strict=False)]
        | None
    ) = None
    tokenizer_sha256: str | None = None
    document_boundaries: bool = False
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = MASK_FRACTION
    mask_ngram: Positive = 3
    whole_words: bool = True
    reader: Literal["mmap", "pread"] = "mmap"

    @property
    def valid_paths(self) -> tuple[str, ...]:
        """The validation datasets, perhaps none."""
        if self.valid is None:
            return ()
        return (self.valid,) if isinstance(self.valid, str) else self.valid


class CheckpointConfig(Section):
    """`every_steps = 0` saves at the end only; `keep = 0` keeps every checkpoint, and `keep_every`
    those at its multiples besides the newest ones."""

    every_steps: NonNegative = 0
    keep: NonNegative = 2
    keep_every: NonNegative = 0
    asynchronous: bool = False
    resume: str = "auto"
    initial: str | None = None


class LogConfig(Section):
    """`validate_every_steps = 0` validates at the end only, where validation data is given.
    `tensorboard` and `wandb` (true: offline) need the extras of these names."""

    every_steps: Positive = 1
    validate_every_steps: NonNegative = 0
    validate_samples: Positive | Literal["all"] = "all"
    bigram_baseline: bool = False
    tensorboard: bool = False
    wandb: bool | Literal["offline", "online"] = False
    wandb_project: str = "ptdmpi"


class CommConfig(Section):
    """`wire` is checked by `ptdmpi.config.wires`, which knows the reasons too."""

    wire: str = AUTO


class Config(Section):
    """A whole run. `resolve` makes one for a given number of ranks."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    comm: CommConfig = CommConfig()

    @property
    def data_size(self) -> int:
        """d; only after `resolve`."""
        if self.parallel.data == "auto":
            raise ValueError("the data axis is not resolved yet")
        return self.parallel.data

    @property
    def microbatches(self) -> int:
        """m = B / (d b), microbatches per pipeline per step."""
        return self.batch.global_size // (self.data_size * self.batch.micro_size)

    def replace(self, section: str, **values: Any) -> Self:
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})
