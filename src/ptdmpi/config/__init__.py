"""Configuration of a run: one TOML file, typed, frozen, validated once.

Rules about the layout stand in `Layout`, all others that tie keys together in `rules`, so that a
mistake is found before any rank allocates memory, and all of a file are reported together.
"""

from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.errors import InputError, SharedInputError
from ptdmpi.config.files import load, resolve, synthetic_config, to_toml
from ptdmpi.config.layout import Layout
from ptdmpi.config.model import ModelConfig, QuantizeConfig
from ptdmpi.config.rules import rules
from ptdmpi.config.sections import (
    BatchConfig,
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    DataParallelConfig,
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
]
