"""A layout: how a model and its batch are spread over ranks, and which of them are legal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.plan.schedule.orders import KINDS, default_kind

LETTERS = {"t": "tensor", "p": "pipeline", "d": "data", "v": "virtual", "b": "micro_size"}
RECOMPUTE_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, chunks per rank, microbatch, and how the step is run."""

    tensor: int
    pipeline: int
    data: int
    virtual: int = 1
    micro_size: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = False
    scatter_gather: bool = True
    zero: int = 0
    dp_overlap: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return ",".join(f"{letter}={getattr(self, name)}" for letter, name in LETTERS.items())

    def microbatches(self, batch: int) -> int:
        """m = B / (d b)."""
        return batch // (self.data * self.micro_size)


def parse(text: str) -> dict[str, int]:
    """ "t=8,p=8,d=1,v=3,b=1" as fields of a Layout; raises InputError for anything else."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        letter, _, value = part.strip().partition("=")
        if letter not in LETTERS or not value.isdigit() or int(value) < 1:
            raise InputError(
                f'layout {text}: "{part}" is no size; write t=8,p=8,d=1,v=3,b=1 '
                "(d, v and b may be left out)"
            )
        if LETTERS[letter] in sizes:
            raise InputError(f"layout {text}: {letter} is given twice")
        sizes[LETTERS[letter]] = int(value)
    return sizes


def complete(sizes: dict[str, int], ranks: int | None, **settings: object) -> Layout:
    """The layout of `sizes`, with d from the number of ranks where it is not given, and the default
    schedule of its v. Raises InputError where sizes and ranks do not agree."""
    sizes = {"tensor": 1, "pipeline": 1, **sizes}
    model_ranks = sizes["tensor"] * sizes["pipeline"]
    if "data" not in sizes:
        if ranks is None:
            raise InputError("give --ranks, or d in --layout")
        if ranks % model_ranks:
            raise InputError(f"layout: t p = {model_ranks} does not divide {ranks} ranks")
        sizes["data"] = ranks // model_ranks
    layout = Layout(**sizes)
    if ranks is not None and layout.ranks != ranks:
        raise InputError(
            f"layout {layout}: t p d = {layout.ranks}, but --ranks is {ranks}; "
            "leave d out, or make them agree"
        )
    settings = {key: value for key, value in settings.items() if value is not None}
    return replace(layout, **{"schedule": default_kind(layout.virtual), **settings})


def mistakes(layout: Layout, model: ModelConfig, batch: int) -> Iterator[str]:
    """Why the layout is not legal for this model and batch; nothing if it is."""
    t, stages = layout.tensor, layout.pipeline * layout.virtual
    for name, size in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden)):
        if size % t:
            yield f"t = {t} does not divide {name} = {size}"
    if not model.heads % t and model.kv_heads % t and t % model.kv_heads:
        yield f"t = {t} neither divides kv_heads = {model.kv_heads} nor is a multiple of it"
    if layout.sequence_parallel and model.seq_length % t:
        yield f"sequence parallelism: t = {t} does not divide s = {model.seq_length}"
    if stages > model.layers:
        yield f"p v = {stages} stages, but the model has {model.layers} layers"
    unit = layout.data * layout.micro_size
    if batch % unit:
        yield f"d b = {unit} does not divide the batch of {batch}"
    if layout.schedule not in KINDS or layout.schedule == "forward":
        yield f'schedule "{layout.schedule}" is unknown; legal are gpipe, 1f1b, interleaved'
    if layout.schedule == "1f1b" and layout.virtual > 1:
        yield f"the schedule 1f1b has v = 1, not {layout.virtual}"
    if layout.recompute not in RECOMPUTE_MODES:
        yield f'recompute "{layout.recompute}" is unknown; legal are {", ".join(RECOMPUTE_MODES)}'
    if layout.zero not in range(4):
        yield f"zero = {layout.zero}: must be 0, 1, 2 or 3"
