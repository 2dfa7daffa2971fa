"""Configuration of a run: one TOML file, typed, frozen, validated once.

Rules about the layout stand in `Layout`, all others that tie keys together in `rules`, so that a
mistake is found before any rank allocates memory, and all of a file are reported together.
"""

from ptdmpi.config.errors import InputError, SharedInputError
from ptdmpi.config.files import load, resolve, synthetic_config, to_toml
from ptdmpi.config.layout import Layout
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.rules import rules
from ptdmpi.config.sections import (
    BatchConfig,
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    TrainDataConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "InputError",
    "Layout",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RunConfig",
    "SharedInputError",
    "TrainDataConfig",
    "load",
    "resolve",
    "rules",
    "synthetic_config",
    "to_toml",
]
