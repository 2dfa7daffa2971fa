"""Time of the embedding and of the head for one microbatch on one rank; see `layer` for the way."""

from functools import cached_property

from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.kept.activations import WIDE_BYTES
from ptdmpi.plan.cost.layer import LocalLinear, Seconds, TensorRank
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.machine.kernels import Machine
from ptdmpi.plan.shape import parameters


class EndTimes(TensorRank):
    """What a model has in front of its first layer and behind its last one, on a tensor rank."""

    def __init__(self, machine: Machine, model: Model, layout: Layout) -> None:
        super().__init__(machine, model, layout)
        self.vocab_size = model.vocab_size
        self.predicted = self.model.predictions() * layout.micro_size

    @cached_property
    def table_elements(self) -> int:
        """Elements of the vocabulary's table on this rank; padded where t does not divide V."""
        return parameters.table_elements(self.model, self.vocab_size, self.layout.tensor)

    @cached_property
    def embedding_forward(self) -> Seconds:
        moved = self.tokens * self.model.hidden * (2 * self.e)
        dropped = self.local_tokens * self.model.hidden * (2 * self.e + self.mask)
        summed_s = self._scatter_s if self.layout.sequence_parallel else self._sum_s
        return Seconds(self._stream(moved, dropped), summed_s)

    @cached_property
    def embedding_backward(self) -> Seconds:
        """A dense gradient is cleared, filled and added, or only the rows that were looked up."""
        if self.model.adapt.adapts:
            return Seconds()
        if self.software.adds_in_place:
            moved = self.tokens * self.model.hidden * (self.e + 2 * self.g)
            gathered = self._gather_s if self.layout.sequence_parallel else 0.0
            return Seconds(self._stream(moved), gathered)
        return Seconds(self._stream(self.table_elements * 2 * (self.e + self.g)))

    @cached_property
    def head_forward(self) -> Seconds:
        """Final norm, logits, cross-entropy in float32: widened, greatest, shifted, exponentials,
        their sum, their quotient. Three numbers per token are summed over the tensor axis, of a
        head for a task none."""
        columns, e = self._columns, self.e
        logits = self.predicted * columns
        norm = self._norm(2 * e)
        product = self.machine.gemm_s(self.predicted, columns, self.model.hidden)
        w = max(e, WIDE_BYTES)
        # one kernel each, in the order of the docstring: those that reduce read only
        sizes = (*((e + w,) if e != w else ()), w, 2 * w, 2 * w, w, 2 * w)
        loss = self.machine.elementwise_s("loss", logits, *(logits * size for size in sizes))
        small = (
            0.0
            if self.model.classifies
            else 3 * self.machine.all_reduce_s(self.predicted * w, self.group)
        )
        gathered = self._gather_s if self.layout.sequence_parallel else 0.0
        return Seconds(norm + product + loss, small + gathered)

    @cached_property
    def head_backward(self) -> Seconds:
        columns, e = self._columns, self.e
        logits = self.predicted * columns
        norm = self._norm(5 * e, backward=True)
        w = max(e, WIDE_BYTES)
        sizes = (2 * w, *((e + w,) if e != w else ()))
        moved = (logits * size for size in sizes)
        loss = self.machine.elementwise_s("loss_backward", logits, *moved)
        linear = self._linear_backward(self._output, self.predicted)
        if self.model.idle() == self.model.layers:
            # nothing in front of it has a backward
            return Seconds(loss + self._weight_gradient(self._output, self.predicted))
        # the head is column-parallel, so its input's gradient is summed over the tensor axis; each
        # rank has that of a task whole
        return Seconds(norm + loss + linear, 0.0 if self.model.classifies else self._sum_s)

    @property
    def _columns(self) -> int:
        """Outputs of the head on this rank: its part of V, or all classes of a task."""
        if self.model.classifies:
            return self.model.classes
        return self.table_elements // self.model.hidden

    @property
    def _output(self) -> LocalLinear:
        trains = self.model.classifies or not self.model.adapt.adapts
        return LocalLinear(self.model.hidden, self._columns, self.model.head_bias, trains)

    @cached_property
    def head_weights(self) -> Seconds:
        """What a split backward leaves for its W; an embedding's is all left for it."""
        again = self.layout.sequence_parallel and not self.model.classifies
        gathered = self._gather_s if again else 0.0
        return Seconds(self._weight_gradient(self._output, self.predicted), gathered)

    @property
    def total_s(self) -> float:
        """There and back."""
        embedding = (self.embedding_forward, self.embedding_backward)
        return sum(part.total for part in (*embedding, self.head_forward, self.head_backward))
