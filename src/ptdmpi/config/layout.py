"""The class `Layout`: the distribution of a model and its batch over ranks.

`Layout` is defined in `config` and not in `plan`, because a configuration is checked before
planning, and `config` may not import `plan`. Code that plans, trains or compares layouts calls
`legality.layout_mistakes` to check whether a layout is legal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from ptdmpi.base.errors import InputError
from ptdmpi.config.choices import default_schedule
from ptdmpi.config.sections import BatchConfig, ParallelConfig, RecomputeConfig
from ptdmpi.config.zero import Sharing, covers_gradients, covers_state, covers_weights

LETTERS = {
    "t": "tensor",
    "c": "context",
    "e": "expert",
    "et": "expert_tensor",
    "p": "pipeline",
    "d": "data",
    "v": "virtual",
    "b": "micro_size",
}


class Dealing(NamedTuple):
    """The distribution of the experts of a layer over `ranks` ranks. If `whole` is True, each
    expert is complete on one rank, and experts are distributed over the `tensor` tensor ranks as
    well as over context and data ranks. If `whole` is False, all tensor ranks divide the width of
    each expert, and `tensor` is 1."""

    ranks: int = 1
    whole: bool = False
    tensor: int = 1

    @property
    def near(self) -> int:
        """Return the number of tensor ranks over which experts are distributed. Undivided experts
        are distributed over tensor ranks first, and then over context and data ranks. The result is
        1 if experts are divided."""
        return math.gcd(self.ranks, self.tensor)

    @property
    def same(self) -> int:
        """Return the number of tensor ranks that have copies of the same undivided experts. Each of
        these ranks computes the experts for different tokens. The result is 1 if experts are
        divided."""
        return self.tensor // self.near


ON_ONE_RANK = Dealing()


@dataclass(frozen=True)
class Layout:
    """The distribution of a model over ranks: sizes of the parallel axes, model chunks per rank,
    microbatch size, and options of a training step.

    Full recomputation applies to the first `recompute_layers` layers; None means all layers. With
    `partition_activations` each of the t tensor ranks keeps only 1/t of the inputs of recomputed
    layers (the P_a of Rajbhandari et al. 2020, section 6.1).

    `expert` (e) is the number of ranks over which the experts of each layer are distributed.
    `expert_tensor` is the number of tensor ranks that divide the width of an expert. None means all
    t tensor ranks. Let c be the context-parallel size, and d the data-parallel size. If all t
    tensor ranks divide each expert, experts are distributed over e neighbours among the c d ranks
    that have the same layers, and there are c d / e copies of each expert. If `expert_tensor` is 1,
    experts are not divided, and they are distributed over e neighbours among the t c d ranks that
    have the same layers.

    `zero` is the stage of ZeRO. ZeRO shards state over the ranks that compute with the same
    weights, and `copies` is the number of these ranks. Stage 1 shards the optimizer's state, stage
    2 also the gradients, and stage 3 also the weights (Rajbhandari et al. 2020, arXiv 1910.02054,
    section 5). The `copies` ranks may form several groups of `shard_group` neighbouring ranks, and
    each group then has a complete copy of the state (Zhao et al. 2023, arXiv 2304.11277, section
    3.2.2). If `shard_group` is None, all `copies` ranks form one group. `offload` says where the
    optimizer's state is stored: on the device ("none"), in the host's memory ("optimizer"; Ren et
    al. 2021, arXiv 2101.06840), or in a file ("disk"). `first_layers` is the number of layers in
    the first stage; None means that the planner chooses the number. `context_method` is the method
    by which attention gets the keys and values of other ranks on the context axis.
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
    shard_group: int | None = None
    offload: str = "none"
    partition_activations: bool = False
    first_layers: int | None = None
    context: int = 1
    context_method: str = "all_gather"
    expert: int = 1
    expert_tensor: int | None = None

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        batch: BatchConfig,
        recompute: RecomputeConfig,
        data: int,
    ) -> Self:
        """Return the layout that the sections of a configuration describe. `data` is the size of
        the data axis; `parallel.data` is ignored, because it may be "auto". `shard_group = "node"`,
        which depends on the number of ranks on a node, is treated as "all".
        """
        group = parallel.shard_group
        return cls(
            tensor=parallel.tensor,
            context=parallel.context,
            context_method=parallel.context_method,
            expert=parallel.expert,
            expert_tensor=None if parallel.expert_tensor == "all" else parallel.expert_tensor,
            pipeline=parallel.pipeline,
            data=data,
            virtual=parallel.virtual,
            micro_size=batch.micro_size,
            schedule=parallel.schedule,
            recompute=recompute.mode,
            sequence_parallel=parallel.sequence_parallel,
            scatter_gather=parallel.scatter_gather,
            recompute_layers=None if recompute.layers == "all" else recompute.layers,
            partition_activations=recompute.partition_activations,
            zero=parallel.zero,
            shard_group=group if isinstance(group, int) else None,
            offload=parallel.offload,
            first_layers=None if parallel.first_layers == "auto" else parallel.first_layers,
        )

    @property
    def shards(self) -> int:
        """Return the number of shards into which the state is divided; 1 if nothing is sharded."""
        if not covers_state(self.zero):
            return 1
        return self.shard_group or self.copies

    @property
    def token_ranks(self) -> int:
        """Return the number of ranks that have the same layers but process different tokens:
        context-parallel size c times data-parallel size d.
        """
        return self.context * self.data

    @property
    def copies(self) -> int:
        """Return the number of ranks that compute with the same weights but process different
        tokens: c d / n, for context-parallel size c and data-parallel size d. Here n is the number
        of context and data ranks over which experts are distributed (`expert_tokens`).
        """
        return max(1, self.token_ranks // self.expert_tokens)

    @property
    def dealing(self) -> Dealing:
        """Return how the experts of a layer are distributed over ranks."""
        if self.expert_tensor == 1 and self.tensor > 1:
            return Dealing(self.expert, True, self.tensor)
        # a search calls this method millions of times, so the object for the most frequent result
        # is created only once
        return ON_ONE_RANK if self.expert == 1 else Dealing(self.expert)

    @property
    def expert_tokens(self) -> int:
        """Return the number of context and data ranks over which experts are distributed."""
        # test the most frequent case first, because a search over layouts reads this result very
        # often
        return 1 if self.expert == 1 else self.expert // self.dealing.near

    @property
    def expert_context(self) -> int:
        """Return the number of context ranks over which experts are distributed. Undivided experts
        are distributed over tensor ranks first, then over context ranks, and then over data ranks.
        Divided experts are distributed over context ranks and then over data ranks."""
        return math.gcd(self.expert_tokens, self.context)

    @property
    def expert_data(self) -> int:
        """Return the number of data ranks over which experts are distributed."""
        return self.expert_tokens // self.expert_context

    def computes_by_source(self, microbatches: int) -> bool:
        """Return True if an expert computes the tokens of each source rank separately. A source
        rank is a rank that sends tokens to the expert. The results are then bit-identical to those
        of data parallelism without distributed experts. `microbatches` is the number of
        microbatches of a data rank in a step.

        Equal bits are possible only if experts are distributed over all context and data ranks but
        not over tensor ranks, and each data rank has one microbatch. The gradient of an expert is
        then a sum over source ranks only. In all other layouts an expert computes the tokens of all
        source ranks together.
        """
        every = 1 < self.expert == self.token_ranks
        return every and not self.dealing.whole and microbatches == 1

    @property
    def sharing(self) -> Sharing:
        """Return the stage of ZeRO and the number of ranks in a shard group."""
        return Sharing(self.zero, self.shards)

    @property
    def shards_state(self) -> bool:
        """Return True if the optimizer's state is sharded, so that each rank updates only its
        shard.
        """
        return covers_state(self.zero) and self.shards > 1

    @property
    def shards_gradients(self) -> bool:
        """Return True if the gradients are sharded. Sharded gradients are reduced after each
        microbatch."""
        return covers_gradients(self.zero) and self.shards > 1

    @property
    def shards_weights(self) -> bool:
        """Return True if the weights are sharded. Sharded weights are gathered for each use."""
        return covers_weights(self.zero) and self.shards > 1

    @property
    def sharding(self) -> str:
        """Return the sharding and the offload as text for the user; empty if there is neither."""
        words = []
        if self.shards_state:
            words.append(f"ZeRO {self.zero} in {self.shards} shards")
        if self.offload != "none":
            words.append(f"offload {self.offload}")
        return ", ".join(words)

    @property
    def ranks(self) -> int:
        """Return the number of ranks: the product of the tensor, context, pipeline and
        data axes.
        """
        return self.model_ranks * self.data

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks that compute one sample together: the product of the tensor,
        context and pipeline axes.
        """
        return self.tensor * self.context * self.pipeline

    @property
    def exchange(self) -> str:
        """Return the method by which attention gets the keys and values of other context ranks;
        "none" if each rank has all positions."""
        return self.context_method if self.context > 1 else "none"

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages: pipeline-parallel size p times the model chunks per
        rank v.
        """
        return self.pipeline * self.virtual

    def changed(self, **fields: Any) -> Self:
        """Return a copy of the layout in which `fields` have other values. A search over 10^5
        layouts calls this method, because `dataclasses.replace` takes ten times as long.
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **fields)
        return copy

    def __str__(self) -> str:
        sizes = {letter: getattr(self, name) for letter, name in LETTERS.items()}
        for letter in ("c", "e"):
            if sizes[letter] == 1:
                del sizes[letter]
        if sizes["et"] in (None, self.tensor):
            del sizes["et"]
        return ",".join(f"{letter}={size}" for letter, size in sizes.items())

    def microbatches(self, batch: int) -> int:
        """Return the number of microbatches per pipeline and step: the global batch B divided by
        the data-parallel size d and the microbatch size b.
        """
        return batch // (self.data * self.micro_size)

    def recomputed(self, layer: int) -> str:
        """Return the recomputation mode of a layer. With full recomputation, all layers after the
        first `recompute_layers` layers have the mode "none". Other modes apply to all layers.
        """
        beyond = self.recompute_layers is not None and layer >= self.recompute_layers
        if self.recompute == "full" and beyond:
            return "none"
        return self.recompute

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the keys of a configuration that select this layout, as section -> key -> value.

        The field `dp_overlap` changes the predicted time, but no key of a configuration sets it.
        """
        names = ("tensor", "context", "context_method", "expert", "pipeline", "virtual", "data")
        switches = ("schedule", "zero", "offload", "sequence_parallel", "scatter_gather")
        layers = "all" if self.recompute_layers is None else self.recompute_layers
        group = "all" if self.shard_group is None else self.shard_group
        parallel = {key: getattr(self, key) for key in (*names, *switches)}
        parallel["expert_tensor"] = "all" if self.expert_tensor is None else self.expert_tensor
        parallel["first_layers"] = "auto" if self.first_layers is None else self.first_layers
        return {
            "parallel": {**parallel, "shard_group": group},
            "batch": {"micro_size": self.micro_size},
            "recompute": {
                "mode": self.recompute,
                "layers": layers,
                "partition_activations": self.partition_activations,
            },
        }


def parse(text: str) -> dict[str, int]:
    """Return the sizes in a text such as "t=8,p=8,d=1,v=3,b=1", as a dict from the name of a field
    of `Layout` to its size. Raise InputError if the text does not have this form."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        letter, _, value = part.strip().partition("=")
        if letter not in LETTERS or not value.isdigit() or int(value) < 1:
            raise InputError(
                f'layout {text}: "{part}" is not a size; write sizes such as t=8,p=8,d=1,v=3,b=1 '
                "(c, e, et, d, v and b may be left out)"
            )
        if LETTERS[letter] in sizes:
            raise InputError(f"layout {text}: {letter} is given twice")
        sizes[LETTERS[letter]] = int(value)
    return sizes


def complete(sizes: Mapping[str, int], ranks: int | None, **settings: Any) -> Layout:
    """Return the layout whose fields have the values in `sizes`. If the data-parallel size d is not
    given, it is computed from the number of ranks. The schedule is the default for the number of
    model chunks per rank v. `settings` are values of other fields; a value of None is ignored.
    Raise InputError if the sizes do not fit the number of ranks.
    """
    tensor, pipeline = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    context, expert = sizes.get("context", 1), sizes.get("expert", 1)
    model_ranks = tensor * context * pipeline
    data = sizes.get("data")
    if data is None:
        if ranks is None:
            raise InputError("give --ranks, or d in --layout")
        if ranks % model_ranks:
            raise InputError(f"layout: t c p = {model_ranks} does not divide {ranks} ranks")
        data = ranks // model_ranks
    virtual, micro_size = sizes.get("virtual", 1), sizes.get("micro_size", 1)
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        virtual=virtual,
        micro_size=micro_size,
        context=context,
        expert=expert,
        expert_tensor=sizes.get("expert_tensor"),
    )
    if ranks is not None and layout.ranks != ranks:
        raise InputError(
            f"layout {layout}: t c p d = {layout.ranks}, but --ranks is {ranks}; "
            "leave d out, or correct one of the two"
        )
    settings = {key: value for key, value in settings.items() if value is not None}
    return replace(layout, **{"schedule": default_schedule(layout.virtual), **settings})
