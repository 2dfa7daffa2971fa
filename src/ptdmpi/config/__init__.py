"""The configuration of a run: one TOML file, which is read into typed, frozen objects and validated
once.

The classes of the sections check single keys, the module `legality` checks a layout, and the
package `rules` checks combinations of keys. All mistakes in a file are reported together, before
any rank allocates memory.
"""

from ptdmpi.base.errors import InputError, SharedInputError
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Config
from ptdmpi.config.files import load, resolve, synthetic_config, to_toml, with_values
from ptdmpi.config.layout import Layout
from ptdmpi.config.methods import DataParallelConfig
from ptdmpi.config.model import ModelConfig, QuantizeConfig
from ptdmpi.config.rules import rules
from ptdmpi.config.sections import (
    BatchConfig,
    CheckpointConfig,
    CommConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RateGroup,
    RecomputeConfig,
    RunConfig,
    TaskConfig,
    TrainDataConfig,
)

__all__ = [
    "AdaptConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "InputError",
    "Layout",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "QuantizeConfig",
    "RateGroup",
    "RecomputeConfig",
    "RunConfig",
    "SharedInputError",
    "TaskConfig",
    "TrainDataConfig",
    "load",
    "resolve",
    "rules",
    "synthetic_config",
    "to_toml",
    "with_values",
]
