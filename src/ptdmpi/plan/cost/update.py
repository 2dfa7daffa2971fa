"""What follows the pipeline in a step: gradients summed over the data axis, then the optimizer."""

from functools import cache

from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.activations import WIDE_BYTES
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.shape import parameters

VIEW_S = 2e-6  # the host's time for an operation in Python (pytorch/pytorch issue 41383, July 2020)


class UpdateTimes:
    """Seconds of messages over the data axis and of the optimizer, of one model and batch.

    `elements` are always the parameters of one rank.
    """

    def __init__(self, machine: Machine, model: Model, batch: int) -> None:
        self.machine, self.cluster = machine, machine.cluster
        self.model, self.vocab_size, self.batch = model.config, model.vocab_size, batch
        self._all_tensors_s = cache(self._counted_tensors_s)

    def data_group(self, layout: Layout) -> Group:
        """Ranks t apart, so that a node holds devices / t of each group."""
        per_node = max(1, self.cluster.node.devices // layout.tensor)
        return Group(layout.data, min(per_node, layout.data))

    def data_s(self, layout: Layout, elements: int) -> float:
        """Sums over the data axis of a step, and the tied table's over the pipeline's ends.

        ZeRO 1 sums and shards at once and gathers the weights: the volume of an all-reduce. ZeRO 2
        does so for every microbatch's gradients, ZeRO 3 also gathers each weight before use.
        """
        group, machine = self.data_group(layout), self.machine
        gradient, weight = self.cluster.software.gradient_bytes, machine.element_bytes
        microbatches = layout.microbatches(self.batch)
        if layout.data == 1:
            summed_s = 0.0
        elif layout.zero == 0:
            summed_s = machine.all_reduce_s(elements * gradient, group)
        elif layout.zero < 3:
            # under ZeRO 2 no rank keeps a whole gradient from one microbatch to the next
            times = microbatches if layout.zero == 2 else 1
            summed_s = times * machine.reduce_scatter_s(elements * gradient, group)
            summed_s += machine.all_gather_s(elements * weight, group)
        else:
            summed_s = microbatches * self._sharded_s(layout, elements)
        if layout.pipeline > 1 and self.model.tie_embeddings:
            table = self._table_elements(layout.tensor) * gradient
            one_node = layout.ranks <= self.cluster.node.devices
            # the first and the last stage, a pair: on one node, or each on a node of its own
            summed_s += machine.all_reduce_s(table, Group(2, 1 + one_node))
        return summed_s

    def layer_tensors(self, tensor: int) -> list[int]:
        """Elements of a layer's weights, biases and norms on a tensor rank."""
        every = parameters.layer(self.model).values()
        return [size for part in every for size in part.weights(tensor)]

    def _table_elements(self, tensor: int) -> int:
        return parameters.table_elements(self.model, self.vocab_size, tensor)

    def _sharded_s(self, layout: Layout, elements: int) -> float:
        """ZeRO 3 of one microbatch: weights are gathered forwards and backwards, and to recompute,
        and gradients summed, layer by layer or, as in DeepSpeed of 2021, tensor by tensor."""
        machine, group = self.machine, self.data_group(layout)
        weight, gradient = machine.element_bytes, self.cluster.software.gradient_bytes
        # Rajbhandari et al. 2020, section 7.2.2: the weights are let go after each use
        gathers = 3 if layout.recompute == "full" else 2
        # of the mean stage: messages are many and alike, so a layer more or less is little
        layers = max(1, self.model.layers // layout.pipeline)
        if self.cluster.software.zero_unit == "layer":
            one_s = gathers * machine.all_gather_s(elements * weight / layers, group)
            one_s += machine.reduce_scatter_s(elements * gradient / layers, group)
            return layers * one_s
        gathered_s, reduced_s = self._all_tensors_s(layout.tensor, layers, group)
        return gathers * gathered_s + reduced_s

    def _counted_tensors_s(self, tensor: int, layers: int, group: Group) -> tuple[float, float]:
        """(gathering, summing) each tensor of a rank's layers and the vocabulary's table, one by
        one. Small ones cost their start, so no product of sizes stands for them all; but the layers
        are alike, so each size is priced once."""
        sizes, table = self.layer_tensors(tensor), self._table_elements(tensor)
        taken = {size: self._one_tensor_s(size, group) for size in {*sizes, table}}
        gathered_s = reduced_s = 0.0
        for size in [*sizes * layers, table]:
            gather_s, cleared_s, reduce_s, divided_s = taken[size]
            gathered_s += gather_s
            gathered_s += cleared_s
            reduced_s += reduce_s
            reduced_s += divided_s
        return gathered_s, reduced_s

    def _one_tensor_s(self, elements: int, group: Group) -> tuple[float, float, float, float]:
        """(its gathering, the buffer that is cleared for it, the sum of its gradient, its division
        by d); the second and the fourth with the copies of torch's list collectives."""
        machine = self.machine
        weights, gradients = (
            elements * each
            for each in (machine.element_bytes, self.cluster.software.gradient_bytes)
        )
        return (
            machine.all_gather_s(weights, group),
            machine.stream_s(weights) + self._listed_s(elements, group.ranks),
            machine.reduce_scatter_s(gradients, group),
            machine.stream_s(2 * gradients) + self._listed_s(elements, group.ranks),
        )

    def _listed_s(self, elements: int, ranks: int) -> float:
        """torch's list collectives need a view of each rank's part, and copy it by a kernel."""
        moved_s = self.machine.stream_s(2 * elements * self.machine.element_bytes)
        copied_s = max(ranks * self.cluster.device.kernel_s, moved_s)
        return ranks * VIEW_S + copied_s

    def optimizer_s(self, layout: Layout, elements: int) -> float:
        """Kernels bound by memory, bytes per parameter: clear the gradients; divide them by d
        (this trainer has the weights in its loss);
        widen them where they are narrower than the masters; fp16 takes its loss scale out; norm;
        scale; AdamW reads four numbers and writes three; copy the masters to the weights."""
        gradient, weight = self.cluster.software.gradient_bytes, self.machine.element_bytes
        w = WIDE_BYTES
        kernels = [w, 2 * w, 7 * w]
        if gradient < w:
            kernels.append(gradient + w)
        if self.machine.dtype == "fp16":
            kernels.append(2 * w)
        if weight < w:
            kernels.append(w + weight)
        # ZeRO of any stage shards masters and moments, so each rank updates its d-th part
        shard = elements / (layout.data if layout.zero else 1)
        update_s = self.machine.update_s(shard, kernels)
        summed_only = layout.data == 1 or self.cluster.software.adds_in_place
        divided = 0 if summed_only else 2 * gradient
        return update_s + self.machine.stream_s(elements * (gradient + divided))
