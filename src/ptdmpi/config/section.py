"""What all sections of a configuration are made of: the frozen table, and bounded numbers."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST = 10**12  # of any count: more is a slip of the pen
# Sequences of a step, and ranks. The largest batches that are published have some 10^5 sequences;
# 10^9 of 2,048 tokens are what Llama 2 saw in its whole training (arXiv 2307.09288, Table 1).
MOST_BATCH = MOST_RANKS = 10**9
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("no path has a NUL in it")
    return path


PathText = Annotated[str, AfterValidator(_without_nul)]
FileName = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
DirectoryName = FileName  # an empty one would mean the directory here


def _is_below(name: str) -> str:
    """A run's name is that of its directory below runs/."""
    if not name.isprintable() or any(part.strip() in ("", ".", "..") for part in name.split("/")):
        raise ValueError("legal: a name such as first or tries/first, without . and .. as parts")
    return name


RunName = Annotated[str, AfterValidator(_is_below)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
