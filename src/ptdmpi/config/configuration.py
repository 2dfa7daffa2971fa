"""The complete configuration of a run (`Config`), and a configuration in which sections may be
missing (`Sections`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field

from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.layout import Layout
from ptdmpi.config.methods import DataParallelConfig
from ptdmpi.config.model import ModelConfig, QuantizeConfig
from ptdmpi.config.section import FrozenTable, Section
from ptdmpi.config.sections import (
    BatchConfig,
    CheckpointConfig,
    CommConfig,
    DataConfig,
    DistillationConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    PreferenceConfig,
    RecomputeConfig,
    RunConfig,
    TaskConfig,
)


class Config(FrozenTable):
    """The complete configuration of a run. `resolve` makes a `Config` for a given
    number of ranks.
    """

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data_parallel: DataParallelConfig = Field(default_factory=DataParallelConfig)
    adapt: AdaptConfig = Field(default_factory=AdaptConfig)
    batch: BatchConfig
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    quantize: QuantizeConfig = Field(default_factory=QuantizeConfig)
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    data: DataConfig
    task: TaskConfig = Field(default_factory=TaskConfig)
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    comm: CommConfig = Field(default_factory=CommConfig)

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return the class of each section by the section's name, in the order of a configuration
        file."""
        kinds: dict[str, type[Section]] = {}
        for name, field in cls.model_fields.items():
            kind = field.annotation
            assert isinstance(kind, type) and issubclass(kind, Section), name
            kinds[name] = kind
        return kinds

    @property
    def data_size(self) -> int:
        """Return the size d of the data axis. The size is known only after `resolve`."""
        if self.parallel.data == "auto":
            raise ValueError("the data axis is not resolved yet")
        return self.parallel.data

    @property
    def layout(self) -> Layout:
        """Return the layout: the division of the model and the batch over ranks. The layout is
        known only after `resolve`."""
        return Layout.of(self.parallel, self.batch, self.recompute, self.data_size)

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per pipeline and step: the global batch B divided by
        the data-parallel size d and the microbatch size b.
        """
        return self.layout.microbatches(self.batch.global_size)

    def adapted(self) -> Self:
        """Return a copy of the configuration whose model contains the adapters of [adapt], the
        format of [quantize], and the scales of [precision]."""
        model = self.model.adapted(self.adapt, self.quantize, self.precision.scaling)
        return self.model_copy(update={"model": model})

    @property
    def samples(self) -> int:
        """Return the number of samples in a step: the global batch size (in sequences), divided by
        the number of sequences in a sample.
        """
        return self.batch.global_size // self.task.sequences

    def with_head(self) -> Self:
        """Return a copy of the configuration whose model has the head for the task in [task].
        Without a task, return the configuration unchanged. A model with such a head has no output
        layer over the vocabulary, and therefore no tied embedding.
        """
        if self.task.kind == "none":
            return self
        gone = {"tie_embeddings": False, "sentence_order": False}
        return self.replace("model", output_head="classes", classes=self.task.classes, **gone)

    def replace(self, section: str, **values: Any) -> Self:
        """Return a copy of the configuration with other values in one section. The new values are
        not validated.
        """
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})


@dataclass(frozen=True)
class Sections:
    """The sections of a configuration file. Each section is read separately. A section that could
    not be read is None, and rules that need this section are not checked.
    """

    run: RunConfig | None = None
    model: ModelConfig | None = None
    parallel: ParallelConfig | None = None
    data_parallel: DataParallelConfig | None = None
    adapt: AdaptConfig | None = None
    batch: BatchConfig | None = None
    precision: PrecisionConfig | None = None
    quantize: QuantizeConfig | None = None
    recompute: RecomputeConfig | None = None
    optimizer: OptimizerConfig | None = None
    data: DataConfig | None = None
    task: TaskConfig | None = None
    preference: PreferenceConfig | None = None
    distillation: DistillationConfig | None = None
    checkpoint: CheckpointConfig | None = None
    log: LogConfig | None = None
    comm: CommConfig | None = None

    @classmethod
    def of(cls, sections: Mapping[str, Section]) -> Self:
        """Return a `Sections` object made of `sections`, a mapping from name to section. Each
        section must have the class that `Config` declares for it.
        """
        return cls(**dict[str, Any](sections))

    def whole(self) -> Config:
        """Return the configuration made of these sections; none of the sections may be None. The
        sections are not validated again, because their classes have validated them.
        """
        known = {name: getattr(self, name) for name in Config.model_fields}
        return Config.model_construct(set(known), **known)

    @classmethod
    def of_config(cls, config: Config) -> Self:
        """Return the sections of the configuration as a `Sections` object."""
        return cls.of({name: getattr(config, name) for name in Config.model_fields})
