"""Configuration of a run: one TOML file, typed, frozen, validated once.

Every rule about sizes that must divide each other stands in `rules`, so that a mistake is found
before any rank allocates memory, and all mistakes of a file are reported together.
"""

from ptdmpi.config.errors import InputError
from ptdmpi.config.files import load, resolve, to_toml
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
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RunConfig",
    "TrainDataConfig",
    "load",
    "resolve",
    "rules",
    "to_toml",
]
