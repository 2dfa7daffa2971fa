"""A layout: how a model and its batch are spread over ranks. The only owner of what is legal.

It stands here and not in `plan`, because a configuration is checked before anything is planned:
`config` may not import `plan`, and whoever plans, trains or compares asks `Layout.mistakes`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from ptdmpi.base.words import counted
from ptdmpi.config.errors import InputError
from ptdmpi.config.near import divisors, nearest

if TYPE_CHECKING:
    from ptdmpi.config.model import ModelConfig
    from ptdmpi.config.sections import BatchConfig, ParallelConfig, RecomputeConfig

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
RecomputeMode = Literal["none", "selective", "full"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
RECOMPUTE_MODES: tuple[str, ...] = get_args(RecomputeMode)
LETTERS = {"t": "tensor", "p": "pipeline", "d": "data", "v": "virtual", "b": "micro_size"}
# Schedules that run so many chunks per rank and no others.
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-v": 2}
# Forwards (and as many backwards) of a step over all stages. The order of a step is listed before
# it runs: so many take a second or two.
MOST_FORWARDS = 250_000


class Rule(NamedTuple):
    """One rule of legality, its short name, and the text for whoever broke it."""

    name: str
    broken: bool
    text: Callable[[], str]


def default_schedule(virtual: int) -> str:
    """The schedule used when none is named: 1f1b for one chunk per rank, else interleaved."""
    return "1f1b" if virtual == 1 else "interleaved"


def chunk_rule(schedule: str, virtual: int) -> Rule:
    """1F1B and ZB-H1 run one chunk per rank, ZB-V two; any number is interleaved (Narayanan et al.
    2021, section 2; Qi et al. 2023, arXiv 2401.10241, sections 2.3 and 6)."""
    chunks = CHUNKS.get(schedule, virtual)
    return Rule(
        "chunks",
        virtual != chunks,
        lambda: (
            f'schedule = "{schedule}" has virtual = {chunks}, not {virtual}; '
            f'legal: schedule = "interleaved" or "gpipe", or virtual = {chunks}'
        ),
    )


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, chunks per rank, microbatch, and how the step is run.

    `recompute_layers`: full recomputation takes the first so many layers; None means all.
    """

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
    recompute_layers: int | None = None

    @classmethod
    def of(
        cls,
        parallel: "ParallelConfig",
        batch: "BatchConfig",
        recompute: "RecomputeConfig",
        data: int,
    ) -> Self:
        """The layout that sections of a configuration describe; `data` where that is "auto"."""
        return cls(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            data=data,
            virtual=parallel.virtual,
            micro_size=batch.micro_size,
            schedule=parallel.schedule,
            recompute=recompute.mode,
            sequence_parallel=parallel.sequence_parallel,
            scatter_gather=parallel.scatter_gather,
            recompute_layers=None if recompute.layers == "all" else recompute.layers,
        )

    @property
    def ranks(self) -> int:
        """n = t p d."""
        return self.tensor * self.pipeline * self.data

    @property
    def stages(self) -> int:
        """Model chunks of all pipeline ranks, p v."""
        return self.pipeline * self.virtual

    def __str__(self) -> str:
        return ",".join(f"{letter}={getattr(self, name)}" for letter, name in LETTERS.items())

    def microbatches(self, batch: int) -> int:
        """m = B / (d b)."""
        return batch // (self.data * self.micro_size)

    def recomputed(self, layer: int) -> str:
        """The recomputation mode of a layer: beyond `recompute_layers` nothing is recomputed."""
        beyond = self.recompute_layers is not None and layer >= self.recompute_layers
        return "none" if self.recompute == "full" and beyond else self.recompute

    def sections(self) -> dict[str, dict[str, Any]]:
        """The keys of a configuration that select this layout: section -> key -> value.

        `zero` and `dp_overlap` are priced only and have no key.
        """
        names = ("tensor", "pipeline", "virtual", "data", "schedule")
        switches = ("sequence_parallel", "scatter_gather")
        layers = "all" if self.recompute_layers is None else self.recompute_layers
        return {
            "parallel": {key: getattr(self, key) for key in (*names, *switches)},
            "batch": {"micro_size": self.micro_size},
            "recompute": {"mode": self.recompute, "layers": layers},
        }

    def mistakes(self, model: "ModelConfig | None", batch: int | None) -> Iterator[str]:
        """Why the layout is not legal for this model and global batch, each with what would be;
        nothing if it is. None: not known, and the rules about it are left out."""
        return (rule.text() for rule in self.rules(model, batch) if rule.broken)

    def is_legal(self, model: "ModelConfig | None", batch: int | None) -> bool:
        """Whether `mistakes` has nothing to say; no text is made."""
        return not any(rule.broken for rule in self.rules(model, batch))

    def rules(self, model: "ModelConfig | None", batch: int | None) -> Iterator[Rule]:
        """Every rule about this layout, kept or broken; see `mistakes`."""
        chunks = chunk_rule(self.schedule, self.virtual)
        yield chunks._replace(text=lambda: f"parallel.{chunks.text()}")
        if model is not None:
            yield from self._model_rules(model)
        yield from self._setting_rules()
        if batch is not None:
            yield from self._batch_rules(batch)

    def _model_rules(self, model: "ModelConfig") -> Iterator[Rule]:
        yield self._divides("heads", model.heads)
        yield self._key_heads(model)
        yield self._divides("ffn_hidden", model.ffn_hidden)
        yield Rule(
            "sequence",
            self.sequence_parallel and model.seq_length % self.tensor > 0,
            lambda: (
                f"sequence_parallel: parallel.tensor = {self.tensor} does not divide "
                f"model.seq_length = {model.seq_length}; legal nearby: "
                f"{nearest(self.tensor, divisors(model.seq_length))}"
            ),
        )
        yield Rule(
            "stages",
            self.stages > model.layers,
            lambda: (
                f"parallel.pipeline * virtual = {self.stages} stages, but model.layers = "
                f"{model.layers}; at most one stage per layer"
            ),
        )
        layers = self.recompute_layers
        yield Rule(
            "recompute_layers",
            self.recompute == "full" and layers is not None and layers > model.layers,
            lambda: f"recompute.layers = {layers}: the model has {counted(model.layers, 'layer')}",
        )

    def _key_heads(self, model: "ModelConfig") -> Rule:
        """Ranks beyond the key heads share one: whole ranks for each, or whole heads for each."""
        tensor, heads = self.tensor, model.kv_heads

        def text() -> str:
            legal = [k for k in divisors(model.heads) if not (heads % k and k % heads)]
            return (
                f"parallel.tensor = {tensor} neither divides model.kv_heads = {heads} nor is "
                f"a multiple of it; legal nearby: tensor {nearest(tensor, legal)}"
            )

        uneven = heads % tensor > 0 and tensor % heads > 0
        return Rule("kv_heads", uneven and not model.heads % tensor, text)

    def _divides(self, key: str, size: int) -> Rule:
        return Rule(
            key,
            size % self.tensor > 0,
            lambda: (
                f"parallel.tensor = {self.tensor} does not divide model.{key} = {size}; "
                f"legal nearby: tensor {nearest(self.tensor, divisors(size))}"
            ),
        )

    def _setting_rules(self) -> Iterator[Rule]:
        """What needs neither model nor batch; the sections of a configuration know the words."""
        for key, legal in (("schedule", SCHEDULES), ("recompute", RECOMPUTE_MODES)):
            value = getattr(self, key)
            yield Rule(
                key,
                value not in legal,
                partial(_unknown, key, value, legal),
            )
        yield Rule(
            "recompute_layers",
            self.recompute != "full" and self.recompute_layers is not None,
            lambda: 'recompute.layers belongs to recompute.mode = "full"',
        )
        yield Rule(
            "zero", self.zero not in range(4), lambda: f"zero = {self.zero}: must be 0, 1, 2 or 3"
        )

    def _batch_rules(self, batch: int) -> Iterator[Rule]:
        unit = self.data * self.micro_size
        below = batch // unit * unit
        yield Rule(
            "batch",
            batch % unit > 0,
            lambda: (
                f"batch.global_size = {batch} is no multiple of data * micro_size = {self.data} * "
                f"{self.micro_size} = {unit}; legal nearby: "
                f"{nearest(batch, [n for n in (below, below + unit) if n])}"
            ),
        )
        most = max(1, MOST_FORWARDS // self.stages)
        yield Rule(
            "length",
            self.microbatches(batch) > most,
            lambda: (
                f"batch.global_size = {batch} makes {self.microbatches(batch)} microbatches of a "
                f"step, and with {counted(self.stages, 'stage')} at most "
                f"{most} are ordered in advance; legal: a global_size of at most {most * unit}, "
                f"or a micro_size of at least {-(-batch // (most * self.data))}"
            ),
        )


def _unknown(key: str, value: str, legal: Sequence[str]) -> str:
    return f'{key} "{value}" is unknown; legal are {", ".join(legal)}'


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


def complete(sizes: Mapping[str, int], ranks: int | None, **settings: Any) -> Layout:
    """The layout of `sizes`, with d from the number of ranks where it is not given, and the default
    schedule of its v; `settings` that are None are left out. Raises InputError where sizes and
    ranks do not agree."""
    tensor, pipeline = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    model_ranks = tensor * pipeline
    data = sizes.get("data")
    if data is None:
        if ranks is None:
            raise InputError("give --ranks, or d in --layout")
        if ranks % model_ranks:
            raise InputError(f"layout: t p = {model_ranks} does not divide {ranks} ranks")
        data = ranks // model_ranks
    virtual, micro_size = sizes.get("virtual", 1), sizes.get("micro_size", 1)
    layout = Layout(tensor, pipeline, data, virtual, micro_size)
    if ranks is not None and layout.ranks != ranks:
        raise InputError(
            f"layout {layout}: t p d = {layout.ranks}, but --ranks is {ranks}; "
            "leave d out, or make them agree"
        )
    settings = {key: value for key, value in settings.items() if value is not None}
    return replace(layout, **{"schedule": default_schedule(layout.virtual), **settings})
