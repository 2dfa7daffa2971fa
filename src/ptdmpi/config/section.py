"""The base classes of all sections of a configuration, and the types of their keys."""

from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ptdmpi.base.words import mistake_in_path

MOST = 10**12  # the maximum value of every key that is a count; a larger value is surely a typo.
# The maximum number of sequences in a step, and the maximum number of ranks. The largest published
# batches have about 10^5 sequences. One step of 10^9 sequences of 2,048 tokens would have as many
# tokens as the whole training of Llama 2 (arXiv 2307.09288, Table 1), so a larger number is surely
# a typo.
MOST_BATCH = MOST_RANKS = 10**9
MOST_THREADS = 1024  # the maximum number of threads of a rank
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _legal(path: str) -> str:
    mistake = mistake_in_path(path)
    if mistake:
        raise ValueError(mistake)
    return path


PathText = Annotated[str, AfterValidator(_legal)]
FileName = Annotated[str, Field(min_length=1), AfterValidator(_legal)]
DirectoryName = FileName  # not empty, because "" would mean the current directory


def _is_below(name: str) -> str:
    """Return `name`, the name of a run, if it is a valid path below runs/; otherwise raise
    ValueError."""
    if not name.isprintable() or any(part.strip() in ("", ".", "..") for part in name.split("/")):
        raise ValueError("legal: a name such as first or tries/first, without . and .. as parts")
    return name


RunName = Annotated[str, AfterValidator(_is_below)]


class OnResume(Enum):
    """The possible effects of a changed key when a run resumes from a checkpoint."""

    BOUND = "refused"
    BOUND_ORDER = 'refused, unless data.change = "from here" allows it'
    REPORTED = "reported in the log, in the records and in the report"
    FREE = "not reported: the key does not change the results of the training"


Value = TypeVar("Value")
# The annotation of a key (such as `steps: Reported[Positive]`) gives the effect of a changed value
# when a run resumes.
Bound = Annotated[Value, OnResume.BOUND]
BoundOrder = Annotated[Value, OnResume.BOUND_ORDER]
Reported = Annotated[Value, OnResume.REPORTED]
Free = Annotated[Value, OnResume.FREE]


class FrozenTable(BaseModel):
    """The base class of tables in a configuration. The objects of its subclasses are immutable.
    Unknown keys and implicit type conversions are errors.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )


class Section(FrozenTable):
    """The base class of sections. The annotation of each key must contain one `OnResume`: the
    effect of a changed value when a run resumes. The definition of a class raises TypeError if a
    key has no such annotation, or more than one.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        for key in cls.model_fields:
            cls.on_resume(key)

    @classmethod
    def on_resume(cls, key: str) -> OnResume:
        """Return the effect on a resumed run if the value of `key` has changed."""
        metadata = cls.model_fields[key].metadata
        declared = [item for item in metadata if isinstance(item, OnResume)]
        if len(declared) != 1:
            raise TypeError(
                f"{cls.__name__}.{key} declares {len(declared)} effects of a change on resume; "
                "annotate it with one of Bound, BoundOrder, Reported and Free"
            )
        return declared[0]
