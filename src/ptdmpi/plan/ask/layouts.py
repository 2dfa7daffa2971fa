"""The answer of `ptdmpi plan`. The answer has the fastest layouts of a model on a cluster, or the
price (step time and memory) of a given layout, with explanations."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from ptdmpi.base.errors import InputError, end_in_one_line
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.choices import CodesName
from ptdmpi.config.layout import Layout, complete, parse
from ptdmpi.config.model import QuantizeConfig
from ptdmpi.config.precision import scaling_of
from ptdmpi.plan.ask.defaults import default_batch, usual_precision
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.layer.legality import is_legal, layout_mistakes
from ptdmpi.plan.machine.cluster import Model, load_cluster, load_model, preset_and_keys
from ptdmpi.plan.search.advice import difference, heuristic, improvements, microbatch_model
from ptdmpi.plan.search.search import HEADROOM, TIE, search
from ptdmpi.plan.search.space import Space, contradiction, of_a_node
from ptdmpi.plan.shape.parameters import active_count, parameter_count
from ptdmpi.plan.show import draw, draw_memory, table
from ptdmpi.plan.show.trace import chrome_trace

ORDERS = ("simplest", "best")
MOST_DRAWN = 10_000  # A step with more microbatches than this is not drawn.
BASE_BLOCK = 64  # Default number of elements of a frozen matrix that share one scale.


@dataclass(frozen=True)
class LayoutRequest:
    """A question to `ptdmpi plan`. The fields are the options of the command.

    If `layout` is given, only this layout is priced, and nothing is searched. `why` is a layout
    that is compared with the best layout. `tokens` is the number of tokens of the whole training.
    If `tokens` is given, the answer has the duration and the rank-hours of the training. `lora` is
    the rank of LoRA adapters on a frozen model. `base_bits` is the quantized format of the frozen
    matrices, and `base_block` is the number of elements that share one scale. A search keeps
    `headroom` percent of a device's memory free. If `order` is "simplest", the first layout of the
    answer is the simplest among the layouts that are almost as fast as the fastest one. If `order`
    is "best", the first layout is the fastest. If a setting of the layout is None, the search
    chooses it. If `layout` is given, a setting that is None has the default of `Layout`. There are
    two exceptions: for `sequence_parallel` and `scatter_gather`, the faster value is chosen.
    """

    model: str
    cluster: str
    ranks: int | None = None
    batch: int | None = None
    layout: str | None = None
    why: str | None = None
    precision: str | None = None
    lora: int | None = None
    base_bits: CodesName | None = None
    base_block: int | None = None
    tokens: float | None = None
    schedule: str | None = None
    recompute: str | None = None
    recompute_layers: int | None = None
    context_method: str | None = None
    sequence_parallel: bool | None = None
    scatter_gather: bool | None = None
    first_layers: int | None = None
    uneven: bool = False
    zero: int | None = None
    shard_group: int | Literal["all", "node"] | None = None
    offload: str | None = None
    partition_activations: bool = False
    dp_overlap: bool = False
    headroom: int = HEADROOM
    order: str = ORDERS[0]

    def space(self, ranks: int) -> Space:
        """Return the set of layouts on `ranks` ranks among which the search for this request may
        choose."""
        return Space(
            ranks,
            schedule=self.schedule,
            recompute=self.recompute,
            recompute_layers=self.recompute_layers,
            context_method=self.context_method,
            sequence_parallel=self.sequence_parallel,
            scatter_gather=self.scatter_gather,
            first_layers=self.first_layers,
            uneven=self.uneven,
            zero=Space.zero if self.zero is None else (self.zero,),
            shard_group=self.shard_group,
            offload=self.offload,
            dp_overlap=self.dp_overlap,
            partition_activations=self.partition_activations,
        )

    def check(self) -> None:
        """Raise InputError if options of the search contradict each other."""
        if self.recompute_layers and self.recompute != "full":
            raise InputError("--recompute-layers belongs to --recompute full")
        if self.uneven and (self.layout or self.first_layers):
            raise InputError(
                "--uneven searches for the number of layers of the first stage, which --layout or "
                "--first-layers would fix: leave one of these options out"
            )

    def adapted(self, model: Model, precision: str) -> Model:
        """Return `model` with the settings of this request: with or without LoRA adapters, and with
        matrix products in 8-bit floating point if `precision` requires them.

        Raise InputError if the options of adapters contradict each other.
        """
        if self.base_bits is not None and self.lora is None:
            raise InputError("--base-bits belongs to --lora")
        if self.base_block is not None and (self.base_bits is None or self.base_block % 2):
            raise InputError(
                f"--base-block {self.base_block}: legal: an even number, and only with --base-bits"
            )
        scaling = scaling_of(precision)
        if self.lora is None:
            return replace(model, config=model.config.adapted(model.config.adapt, None, scaling))
        if scaling != "none":
            raise InputError(f"--precision {precision} does not belong to --lora")
        quantize = None
        if self.base_bits is not None:
            block = self.base_block or BASE_BLOCK
            quantize = QuantizeConfig(weights=self.base_bits, block=block)
        adapt = AdaptConfig(method="lora", rank=self.lora)
        return replace(model, config=model.config.adapted(adapt, quantize))


@dataclass(frozen=True)
class LayoutPlan:
    """The answer to a `LayoutRequest`: the best layout, the pricer that has computed its time and
    memory, and the numbers that --json prints."""

    pricer: Pricer
    layout: Layout
    numbers: dict[str, Any]

    def draw(self, step: str | None, memory: str | None, trace: str | None) -> None:
        """Write a picture of the layout's step to the path `step`, a picture of its memory to
        `memory`, and a trace of the step to `trace`. If a path is None, its file is not written.

        Raise InputError if the step has too many microbatches to be drawn.
        """
        if step is None and memory is None and trace is None:
            return
        self._require_short_step()
        if memory is not None:
            draw_memory.draw(self.pricer, self.layout, memory)
        if step is None and trace is None:
            return
        names = f"{self.pricer.model.name} on {self.pricer.cluster.name}"
        title = f"{names}: {self.layout}, {self.layout.schedule}"
        timeline = self.pricer.timeline(self.layout, title)
        if step is not None:
            draw.figure([timeline], step)
        if trace is not None:
            chrome_trace(timeline, trace)

    def _require_short_step(self) -> None:
        """Raise InputError if a step has too many microbatches to be drawn."""
        layout = self.layout
        microbatches = layout.microbatches(self.pricer.batch)
        if microbatches > MOST_DRAWN:
            raise InputError(
                f"layout {layout}: a step of {microbatches} microbatches is too long to be drawn; "
                f"give a --batch of at most {MOST_DRAWN * layout.data * layout.micro_size}"
            )


def answer(request: LayoutRequest) -> LayoutPlan:
    """Return the best layouts for a request, or the price of the layout that the request names.

    Raises InputError for unknown names, for illegal sizes, for contradictory options, and if no
    layout fits into memory.
    """
    pricer = _pricer(request)
    searched = pricer.keeping_free(request.headroom / 100)
    asked = request.why if request.layout is None else request.layout
    given = None if asked is None else _given_layout(pricer, asked, request)
    request.check()
    ranks = request.ranks if given is None else given.ranks
    if ranks is None:
        raise InputError("give --ranks, or a --layout with d")
    space = request.space(ranks)
    where = f"{pricer.model.name} on {counted(ranks, 'rank')} of {pricer.cluster.name}"
    if request.layout and given is not None:
        note(f"ptdmpi plan: pricing {given} of {where}, batch {pricer.batch}")
        prices = [pricer.price(given)]
    else:
        if mistakes := contradiction(space):
            raise InputError(mistakes)
        note(f"ptdmpi plan: searching layouts of {where}, batch {pricer.batch}")
        tie = TIE if request.order == "simplest" else 0.0
        prices = search(searched, space, tie=tie)
    best = prices[0]
    numbers: dict[str, Any] = {
        "model": pricer.model.name,
        "parameters": parameter_count(pricer.model.config, pricer.model.vocab_size),
        "active_parameters": active_count(pricer.model.config, pricer.model.vocab_size),
        "cluster": pricer.cluster.name,
        "ranks": ranks,
        "batch": pricer.batch,
        "seq_length": pricer.model.config.seq_length,
        "precision": pricer.machine.dtype,
        "layouts": [table.numbers(price, pricer, request.tokens) for price in prices],
    }
    if request.why and given is not None:
        numbers["why"] = _comparison(searched, given, best)
    elif not request.layout:
        numbers |= _rules_of_thumb(searched, space, best)
    numbers["train"] = _training_sections(pricer, best.layout)
    return LayoutPlan(pricer, best.layout, numbers)


def plan(model: str, cluster: str, **options: Any) -> dict[str, Any]:
    """Return the dict that `ptdmpi plan --model MODEL --cluster CLUSTER ... --json` prints.

    `options` are options of the command, such as ranks=64, layout="t=8,p=4,d=2" or zero=3. Neither
    torch nor MPI is needed. Raises InputError in the same cases as `answer`, and TypeError for an
    unknown option. After this call, an InputError that the program does not catch ends it with one
    line and exit code 2.
    """
    end_in_one_line()
    return answer(LayoutRequest(model, cluster, **options)).numbers


def _pricer(request: LayoutRequest) -> Pricer:
    cluster = load_cluster(request.cluster)
    precision = request.precision or usual_precision(cluster)
    model = request.adapted(load_model(request.model), precision)
    batch = request.batch or default_batch(request.model)
    return Pricer.of(cluster, model, batch, precision)


def _given_layout(pricer: Pricer, text: str, request: LayoutRequest) -> Layout:
    """Return the layout that `text` names, completed by the settings of the request. Raises
    InputError if the layout is illegal.

    If the request does not set sequence parallelism or scatter/gather, the layout is priced both
    with and without this setting. The fastest variant that fits into memory is returned, or, if
    none fits, the fastest variant.
    """
    layout = complete(
        parse(text),
        request.ranks,
        schedule=request.schedule,
        recompute=request.recompute,
        recompute_layers=request.recompute_layers,
        context_method=request.context_method,
        sequence_parallel=request.sequence_parallel,
        scatter_gather=request.scatter_gather,
        first_layers=request.first_layers,
        zero=request.zero,
        offload=request.offload,
        partition_activations=request.partition_activations,
        dp_overlap=request.dp_overlap,
    )
    layout = _in_shard_groups(pricer, layout, request.shard_group)
    mistakes = list(layout_mistakes(layout, pricer.model.config, pricer.batch))
    if mistakes:
        raise InputError(f"layout {layout}: {'; '.join(mistakes)}")
    candidates = [layout]
    if layout.tensor > 1 and request.sequence_parallel is None:
        switched = not layout.sequence_parallel
        candidates += [replace(other, sequence_parallel=switched) for other in candidates]
    if layout.tensor > 1 and request.scatter_gather is None:
        switched = not layout.scatter_gather
        candidates += [replace(other, scatter_gather=switched) for other in candidates]
    prices = [
        pricer.price(candidate)
        for candidate in candidates
        if is_legal(candidate, pricer.model.config, pricer.batch)
    ]
    return min(prices, key=lambda price: (not price.fits, price.step_time_s)).layout


def _in_shard_groups(
    pricer: Pricer, layout: Layout, group: int | Literal["all", "node"] | None
) -> Layout:
    """Return the layout with shard groups of `group` ranks, where "node" means the ranks of a node,
    and "all" means all ranks with copies of the same parameters. If `group` is None, return
    `layout` unchanged."""
    if group is None:
        return layout
    if isinstance(group, int):
        size = group
    elif group == "node":
        size = of_a_node(pricer, layout)
    else:
        size = layout.copies
    return replace(layout, shard_group=None if size == layout.copies else size)


def _comparison(pricer: Pricer, layout: Layout, best: Price) -> dict[str, Any]:
    """Return a comparison of `layout` with the best layout. The comparison has the predicted values
    of `layout`, the part of the step time that differs the most, and the changes of settings that
    make `layout` faster."""
    price = pricer.price(layout)
    parts = table.parts_s(price)
    best_parts = table.parts_s(best)
    named = dict.fromkeys((*best_parts, *parts))
    differences = {part: parts.get(part, 0.0) - best_parts.get(part, 0.0) for part in named}
    largest = max(differences, key=lambda part: abs(differences[part]))
    at_once, improved = improvements(price, pricer)
    changes = [
        {"change": difference(layout, other.layout), **table.numbers(other, pricer, None)}
        for other in improved
    ]
    return {
        "layout": table.numbers(price, pricer, None),
        "slower_than_best": price.step_time_s / best.step_time_s - 1,
        "largest_difference": {"part": largest, "seconds": differences[largest]},
        "changes_at_once": at_once,
        "changes": changes,
    }


def _rules_of_thumb(pricer: Pricer, space: Space, best: Price) -> dict[str, Any]:
    """Return the layout that the rules of Narayanan et al. 2021 choose. Also return the microbatch
    size with which the best layout is the fastest according to equation 1 of that paper."""
    ruled = heuristic(pricer, space)
    times = microbatch_model(pricer, best.layout)
    return {
        "heuristic": None if ruled is None else table.numbers(ruled, pricer, None),
        "microbatch_model": {
            "b": min(times, key=lambda size: times[size]),
            "simulated_b": best.layout.micro_size,
            "seconds": times,
        },
    }


def _training_sections(pricer: Pricer, layout: Layout) -> dict[str, dict[str, Any]] | None:
    """Return the sections of a configuration for `ptdmpi train` with this layout.

    Return None if `ptdmpi train` does not support the layout.
    """
    if layout.dp_overlap:
        return None
    preset, keys = preset_and_keys(pricer.model.name)
    keys.pop("vocab_size", None)  # in a run, the data determines this size
    sections: dict[str, dict[str, Any]] = {}
    if preset is not None:
        sections["model"] = {"preset": preset, **keys}
    adapt = pricer.model.config.adapt
    if adapt.adapts:
        sections["adapt"] = {"method": adapt.method, "rank": adapt.rank}
    quantize = pricer.model.config.quantize
    if quantize.weights != "none":
        sections["quantize"] = quantize.model_dump()
    sections |= {"precision": {"compute": pricer.machine.dtype}, **layout.sections()}
    sections["batch"] = {"global_size": pricer.batch, **sections["batch"]}
    return sections
