"""The time of the messages that sum gradients and gather weights over the context axis and the data
axis.

The context axis has c ranks, and the data axis has d ranks. S ranks form a shard group, which holds
one copy of the sharded state, so there are c d / S shard groups. In a step of m microbatches, each
rank takes part in these messages:

    ZeRO 0   a sum of the gradients over all c d ranks
    ZeRO 1   a reduce-scatter of the gradients within the shard group, a sum of each shard over the
             shard groups, and a gather of the weights after the update
    ZeRO 2   for each unit, a reduce-scatter after each of the m backwards, and then the sum and
             the gather of ZeRO 1
    ZeRO 3   for each unit, the reduce-scatters and the sum of ZeRO 2, and a gather of the weights
             before each forward and each backward, but not after the update; frozen units are
             also gathered

(Rajbhandari et al. 2020, arXiv 1910.02054, section 7; groups: Zhao et al. 2023, arXiv 2304.11277,
section 3.2.2). A unit is the embedding, a layer, or the head; for DeepSpeed of 2021, each tensor is
a unit.
"""

from functools import cache, partial
from typing import NamedTuple

from ptdmpi.config.kinds import LayerKind, LayerRun, count_of, trained_runs
from ptdmpi.config.layout import Layout
from ptdmpi.config.precision import FLOAT32
from ptdmpi.config.zero import Sharing, covers_gradients
from ptdmpi.plan.layer.parts import ALIGNMENT, trained
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import ModelPart, frozen_places

VIEW_S = 2e-6  # the host's time for an operation in Python (pytorch/pytorch issue 41383, July 2020)


class InOps(NamedTuple):
    """The seconds of the messages during a stage's forward and backward of one microbatch. `last_s`
    is the seconds of the last unit's messages, which cannot overlap with computation, because no
    forward or backward follows them in the step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    last_s: float = 0.0


class Behind(NamedTuple):
    """The seconds of the messages after the last backward of a step: messages with gradients, and
    messages with updated weights."""

    gradients_s: float = 0.0
    weights_s: float = 0.0


class StagePlaces(NamedTuple):
    """The properties of a stage that determine the messages during its ops (forwards and backwards)
    under ZeRO 2 or 3.

    `held` is the stage's part of the model. `gathers_weights` is True under ZeRO 3. `group` is the
    shard group. A place is the embedding, a layer or the head. `stays` is the number of places that
    an op need not gather, because their weights are still in memory from the previous op. `gathers`
    is the number of times that DeepSpeed gathers a tensor for a microbatch."""

    held: ModelPart
    gathers_weights: bool
    group: Group
    stays: int
    gathers: int


class DataAxis:
    """The times, in seconds, of a rank's messages over the data axis, for one model on one machine.

    The argument `elements` of the methods is always the number of parameters of one rank.
    """

    def __init__(self, machine: Machine, model: Model) -> None:
        self.machine, self.cluster = machine, machine.cluster
        self.model, self.vocab_size = model.config, model.vocab_size
        self.gradient_bytes = self.cluster.software.gradient_bytes
        self._kind_elements = cache(partial(parameters.kind_elements, self.model))
        self.layer_elements = cache(partial(parameters.trained_elements, self.model))
        self._dense_elements = cache(partial(parameters.dense_elements, self.model))
        self._frozen = cache(partial(frozen_places, self.model, self.vocab_size))
        self._tensor_pair_s = cache(self._one_tensor_s)
        self._unit_pair_s = cache(self._one_unit_s)
        self._in_ops, self._behind = cache(self._counted_in_ops), cache(self._counted_behind)
        self._table_elements = cache(
            partial(parameters.table_elements, self.model, self.vocab_size)
        )
        self.layer_tensors = cache(self._counted_tensors)
        self._tied_s = cache(self._counted_tied_s)

    # -- groups ---------------------------------------------------------------------------------

    def _group(self, ranks: int, stride: int) -> Group:
        """Return a group of `ranks` ranks. The rank numbers of two neighbours in the group differ
        by `stride`."""
        return Group(ranks, min(max(1, self.cluster.node.devices // stride), ranks))

    def shard_group(self, layout: Layout) -> Group:
        """Return a shard group: the ranks that together hold one copy of the state. The rank
        numbers of two neighbours in the group differ by t e, where t is the tensor-parallel size
        and e is the number of context-parallel and data-parallel ranks over which experts are
        distributed."""
        return self._group(layout.shards, layout.tensor * layout.expert_tokens)

    def replicas(self, layout: Layout) -> Group:
        """Return the group of ranks that hold copies of the same shard, one rank of each shard
        group."""
        stride = layout.tensor * layout.expert_tokens * layout.shards
        return self._group(layout.copies // layout.shards, stride)

    # -- after the pipeline ----------------------------------------------------------------------

    def behind(self, layout: Layout, elements: float) -> Behind:
        """Return the seconds of messages after the last backward, for a rank with `elements`
        trained parameters. The result includes the messages in which the first and the last stage
        of the pipeline sum the gradients of a tied table."""
        gradients_s, weights_s = self._ends_s(layout) + self._norms_s(layout, elements), 0.0
        gradients_s += self._dense_s(layout, elements) + self._experts_s(layout, elements)
        for unit, count in self._units(layout, elements):
            groups = self.shard_group(layout), self.replicas(layout)
            each = self._behind(layout.sharing, unit, *groups)
            gradients_s += count * each.gradients_s
            weights_s += count * each.weights_s
        return Behind(gradients_s, weights_s)

    def _dense_s(self, layout: Layout, elements: float) -> float:
        """Return the seconds that ranks with different experts need to sum the gradients of all
        parameters outside experts. A rank has `elements` gradients. If the state is sharded, a rank
        sums only its shard of these gradients. To keep the estimate simple, all `elements`
        gradients are assumed to have the same fraction of parameters outside experts as a layer."""
        dense = self._dense_elements(layout.tensor)
        if layout.expert_tokens == 1 or not dense:
            return 0.0
        share = dense / self.layer_elements(layout.tensor, layout.dealing)
        size = share * elements * self.gradient_bytes / layout.sharing.state_shards
        return self.machine.all_reduce_s(size, self._group(layout.expert_tokens, layout.tensor))

    def _experts_s(self, layout: Layout, elements: float) -> float:
        """Return the seconds that tensor-parallel ranks need to sum the gradients of experts that
        the tensor axis does not divide, so that several tensor-parallel ranks have copies of them.
        A rank has `elements` gradients. As in `_dense_s`, all `elements` gradients are assumed to
        have the same fraction of expert parameters as a layer."""
        dealing = layout.dealing
        if dealing.same == 1:
            return 0.0
        share = 1 - self._dense_elements(layout.tensor) / self.layer_elements(
            layout.tensor, dealing
        )
        size = share * elements * self.gradient_bytes / layout.sharing.state_shards
        return self.machine.all_reduce_s(size, self._group(dealing.same, dealing.near))

    def _units(self, layout: Layout, elements: float) -> list[tuple[float, int]]:
        """Return the messages after the pipeline as pairs (number of elements in a message, number
        of such messages). By default, the `elements` elements are sent in a single message. Under
        ZeRO 2 and 3, if all weights of a layer are sent in one message (`Software.zero_unit`),
        there is one message for each complete layer, and one message for the remaining elements."""
        layer = self.layer_elements(layout.tensor, layout.dealing)
        by_layer = covers_gradients(layout.zero) and layer > 0
        if not by_layer or self.cluster.software.zero_unit == "tensor":
            return [(elements, 1)]
        count, rest = divmod(elements, layer)
        return [(layer, int(count)), (rest, int(rest > 0))]

    def _counted_behind(
        self, sharing: Sharing, unit: float, shards: Group, replicas: Group
    ) -> Behind:
        gradients, gradients_s, weights_s = unit * self.gradient_bytes, 0.0, 0.0
        if sharing.shards_state and not sharing.shards_gradients:
            gradients_s = self.machine.reduce_scatter_s(gradients, shards)
        gradients_s += self.machine.all_reduce_s(gradients / shards.ranks, replicas)
        if sharing.shards_state and not sharing.shards_weights:
            weights_s = self.machine.all_gather_s(unit * self.machine.element_bytes, shards)
        return Behind(gradients_s, weights_s)

    def _norms_s(self, layout: Layout, elements: float) -> float:
        """Return the seconds that ranks need to gather the norms of sharded gradients. There is one
        norm for each block of `ALIGNMENT` elements, because a block is never divided between two
        shards."""
        if layout.shards == 1 or self.cluster.software.zero_unit == "tensor":
            return 0.0
        return self.machine.all_gather_s(
            elements / ALIGNMENT * FLOAT32.bytes, self.shard_group(layout)
        )

    def _ends_s(self, layout: Layout) -> float:
        """Return the seconds that the first and the last stage need to sum the gradients of a tied
        table. If gradients are sharded, each rank sums only its shard of the table's gradients."""
        if layout.pipeline == 1 or not self.model.shares_table or self.model.adapt.adapts:
            return 0.0
        one_node = layout.ranks <= self.cluster.node.devices
        return self._tied_s(layout.tensor, layout.sharing.gradient_shards, one_node)

    def _counted_tied_s(self, tensor: int, shards: int, one_node: bool) -> float:
        """Return the seconds in which two ranks sum their gradients of a tied table. The two ranks
        are on one node if `one_node` is True, and otherwise on two nodes. The table is divided
        among `tensor` tensor-parallel ranks, and the slice of a rank is divided into `shards`
        shards. The two ranks sum one of these shards."""
        table = self._table_elements(tensor) * self.gradient_bytes / shards
        return self.machine.all_reduce_s(table, Group(2, 1 + one_node))

    # -- in the ops ------------------------------------------------------------------------------

    def in_ops(self, layout: Layout, stage: ModelPart) -> InOps:
        """Return the seconds of ZeRO's messages during the ops (forward and backward) of one
        microbatch in a stage. Under ZeRO 0 and 1, no messages are sent during ops."""
        if not layout.shards_gradients:
            return InOps()
        places = StagePlaces(
            held=stage,
            gathers_weights=layout.shards_weights,
            group=self.shard_group(layout),
            # With 1F1B, a rank alternates between forwards and backwards of one chunk. A forward
            # ends with the chunk's last layer, and the next backward begins with this layer, so its
            # weights are still in memory.
            stays=int(layout.schedule == "1f1b"),
            gathers=_gathers(layout),
        )
        return self._in_ops(places)

    def _counted_in_ops(self, stage: StagePlaces) -> InOps:
        """Return the seconds of a stage's messages during the ops of one microbatch. A stage sends
        one message for each unit, or, with DeepSpeed, for each tensor."""
        held, group = stage.held, stage.group
        places = parameters.places(self.model, self.vocab_size, held)
        if self.cluster.software.zero_unit == "tensor":
            gathered_s, summed_s = self._all_tensors_s(held, group)
            if not stage.gathers_weights:
                size = sum(map(sum, places))
                whole_s = self.machine.reduce_scatter_s(size * self.gradient_bytes, group)
                return InOps(0.0, whole_s, whole_s)
            # The weights are freed after each use, and gathered again for the next use (Rajbhandari
            # et al. 2020, section 7.2.2).
            again_s = (stage.gathers - 1) * gathered_s
            return InOps(gathered_s, again_s + summed_s, summed_s / (held.layers + 1))
        pairs = []
        for units in places:
            parts = [self._unit_pair_s(unit, group) for unit in units]
            pairs.append((sum(part[0] for part in parts), sum(part[1] for part in parts)))
        summed_s = sum(pair[1] for pair in pairs)
        if not stage.gathers_weights:
            return InOps(0.0, summed_s, pairs[0][1])
        gathered = [
            pair[0] + sum(self._unit_pair_s(unit, group)[0] for unit in units)
            for pair, units in zip(pairs, self._frozen(held), strict=True)
        ]
        # Layers without a backward come first, and need no weights in the backward.
        skipped = held.idle + (held.idle > 0 and held.first)
        forward_s = sum(gathered[stage.stays :])
        backward_s = sum(gathered[skipped : len(gathered) - stage.stays])
        # The first forward of a step must also gather the first place, because the update has
        # changed its weights.
        first_s = gathered[0]
        return InOps(forward_s, backward_s + summed_s, pairs[0][1] + first_s)

    def least_in_ops_s(self, layout: Layout, layers: float) -> float:
        """Return a lower bound of the seconds of messages during the ops of one microbatch on a
        rank with `layers` trained layers. The bound holds for every schedule. Embedding and head
        are not counted."""
        if not layout.shards_gradients:
            return 0.0
        group = self.shard_group(layout)
        runs = trained_runs(self.model.runs())
        # the fraction of all trained layers that the rank has
        share = layers / max(1, count_of(runs))
        whole_s, most_s = 0.0, 0.0  # Seconds of gathers: the sum and the maximum over layers.
        least_s = 0.0
        for kind, count in runs:
            layer = ModelPart(
                (LayerRun(kind, 1),),
                first=False,
                last=False,
                tensor=layout.tensor,
                dealing=layout.dealing,
            )
            if self.cluster.software.zero_unit == "tensor":
                gathered_s, summed_s = self._all_tensors_s(layer, group)
                if layout.shards_weights:
                    least_s += count * (_gathers(layout) * gathered_s + summed_s)
                continue
            unit = self._kind_elements(kind, layout.tensor, layout.dealing)
            gathered_s, summed_s = self._unit_pair_s(unit, group)
            least_s += count * summed_s
            if layout.shards_weights:
                (frozen,) = self._frozen(layer)
                gathered_s += sum(self._unit_pair_s(size, group)[0] for size in frozen)
                whole_s, most_s = whole_s + count * gathered_s, max(most_s, gathered_s)
        # In a forward and in a backward, the weights of one layer are still in memory from the
        # previous op. For a lower bound, the gather of this layer is taken to be the slowest one,
        # and is subtracted.
        return share * least_s + 2 * max(0.0, share * whole_s - most_s)

    def _one_unit_s(self, elements: int, group: Group) -> tuple[float, float]:
        """Return two times in seconds: the time to gather the weights of a unit (such as a layer)
        of `elements` elements, and the time to sum the unit's gradient. To sum the gradient, a rank
        clears and fills a buffer for the whole unit, takes part in a reduce-scatter of this buffer,
        and adds the result to its shard of the summed gradients."""
        machine, gradients = self.machine, elements * self.gradient_bytes
        summed_s = machine.stream_s(gradients) + machine.reduce_scatter_s(gradients, group)
        summed_s += machine.stream_s(3 * gradients / group.ranks)
        return machine.all_gather_s(elements * machine.element_bytes, group), summed_s

    # -- tensor by tensor ------------------------------------------------------------------------

    def _counted_tensors(self, tensor: int, kind: LayerKind | None = None) -> tuple[int, ...]:
        """Return the number of elements of each trained weight in a layer of kind `kind`, on one of
        `tensor` tensor-parallel ranks. If `kind` is None, the result is for the last layer."""
        every = trained(parameters.layer(self.model, kind).values())
        return tuple(size for part in every for size in part.weights(tensor))

    def _all_tensors_s(self, held: ModelPart, group: Group) -> tuple[float, float]:
        """Return (seconds to gather weights, seconds to sum gradients). Both times are sums over
        the tensors of the stage `held`: all tensors of its layers, and the vocabulary's table if
        the stage has it. Each tensor is sent in a separate message, and the time for a small tensor
        is mostly latency, so the total size alone does not determine the time."""
        gathered_s = summed_s = 0.0
        for kind, count in held.runs:
            for size in self.layer_tensors(held.tensor, kind):
                pair = self._tensor_pair_s(size, group)
                gathered_s, summed_s = gathered_s + count * pair[0], summed_s + count * pair[1]
        layers_alone = held._replace(first=False, last=False)
        # each unit (such as a layer) is gathered as one tensor
        for units in self._frozen(layers_alone):
            gathered_s += sum(self._tensor_pair_s(unit, group)[0] for unit in units)
        if held.first or held.last:
            table_s = self._tensor_pair_s(self._table_elements(held.tensor), group)
            gathered_s, summed_s = gathered_s + table_s[0], summed_s + table_s[1]
        return gathered_s, summed_s

    def _one_tensor_s(self, elements: int, group: Group) -> tuple[float, float]:
        """Return two times in seconds for a tensor of `elements` elements. In the first, a buffer
        is cleared, and the tensor is gathered into the buffer. In the second, the tensor's gradient
        is summed and divided by the data-parallel size. Both times include the copies that torch's
        list collectives make."""
        machine = self.machine
        weights, gradients = elements * machine.element_bytes, elements * self.gradient_bytes
        gathered_s = machine.all_gather_s(weights, group) + machine.stream_s(weights)
        summed_s = machine.reduce_scatter_s(gradients, group) + machine.stream_s(2 * gradients)
        listed_s = self._listed_s(elements, group.ranks)
        return gathered_s + listed_s, summed_s + listed_s

    def _listed_s(self, elements: int, ranks: int) -> float:
        """Return the seconds that a list collective of torch takes in addition to its message, for
        a tensor of `elements` elements. For each rank, it makes a view of the rank's slice of the
        tensor, and launches a kernel that copies the slice."""
        moved_s = self.machine.stream_s(2 * elements * self.machine.element_bytes)
        copied_s = max(ranks * self.cluster.device.kernel_s, moved_s)
        return ranks * VIEW_S + copied_s


def _gathers(layout: Layout) -> int:
    """Return the number of times that DeepSpeed gathers a tensor for a microbatch: once for the
    forward, once for the backward, and once more if the forward is recomputed."""
    return 2 + (layout.recompute == "full")
