"""The times of a layer, of the embedding and of the head for one microbatch on one rank. Each time
is a sum over operators.

An operator lists its kernels and messages (`plan.layer`), and `Machine` gives the time of each
kernel and message on a cluster. The kernels are assumed to be those of Megatron-LM (Shoeybi et al.
2019, arXiv 1909.08053, section 3; Narayanan et al. 2021, section 4.2), which fuse softmax with
mask, bias with GeLU, and bias with dropout and addition.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ptdmpi.config.kinds import LayerKind
from ptdmpi.config.layout import Layout
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import (
    Elementwise,
    FusedAttention,
    Kernel,
    MatrixProduct,
    MemoryPass,
    Message,
    Phase,
)
from ptdmpi.plan.layer.ahead import modules
from ptdmpi.plan.layer.folds import messages, operators, with_inputs
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layout.grid import EXPERTS
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.machine.kernels import Group, Machine


@dataclass(frozen=True)
class Seconds:
    """Three kinds of times, in seconds: of kernels (`compute`), of the messages for which kernels
    wait, and of the host, which launches kernels and messages. The messages are sent over the
    tensor axis (`messages`), over the context axis (`context`), and to ranks with other experts
    (`expert`). If the host needs more time than the device, the device waits for launches."""

    compute: float = 0.0
    messages: float = 0.0
    host: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            compute=self.compute + other.compute,
            messages=self.messages + other.messages,
            host=self.host + other.host,
            context=self.context + other.context,
            expert=self.expert + other.expert,
        )

    def __mul__(self, times: int) -> "Seconds":
        device_s = (self.compute * times, self.messages * times)
        others_s = (self.context * times, self.expert * times)
        return Seconds(*device_s, self.host * times, *others_s)

    @cached_property
    def device(self) -> float:
        """Return the seconds that the device spends on kernels and on the messages for which
        kernels wait."""
        return self.compute + self.messages + self.context + self.expert

    @cached_property
    def total(self) -> float:
        """Return the elapsed seconds: those of the device or those of the host, whichever are
        more."""
        return max(self.device, self.host)

    @cached_property
    def launched(self) -> "Seconds":
        """Return a copy of this object in which `compute` includes the time for which the device
        waits for its host."""
        waits_s = max(0.0, self.host - self.device)
        return replace(self, compute=self.compute + waits_s, host=0.0)


def sizes_on(machine: Machine, model: Model, layout: Layout, *, by_source: bool = False) -> Sizes:
    """Return the sizes of the tensors of a microbatch on a rank of `layout`. If `by_source` is
    True, experts compute the tokens of each source rank separately."""
    cluster = machine.cluster
    return Sizes(
        model=model.config,
        layout=layout,
        precision=machine.dtype,
        software=cluster.software,
        on_host=cluster.on_host,
        by_source=by_source,
    )


class TensorRank:
    """The times of kernels and messages on one tensor-parallel rank of `layout`, for one
    microbatch."""

    def __init__(self, machine: Machine, sizes: Sizes) -> None:
        self.machine = machine
        self.sizes = sizes
        layout = sizes.layout
        tensor = layout.tensor
        near = machine.cluster.node.devices
        self.group = Group(tensor, min(tensor, near))
        inside = min(layout.context, max(1, near // tensor))
        # the rank numbers of two neighbours in an expert group differ by `between`
        between = tensor // layout.dealing.tensor
        dealt = Group(layout.expert, min(layout.expert, max(1, near // between)))
        self.groups = {
            "tensor": self.group,
            "context": Group(layout.context, inside),
            EXPERTS: dealt,
        }

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the seconds that the machine needs to compute `kernel`."""
        machine = self.machine
        match kernel:
            case MatrixProduct(m, n, k, batch, of_codes=True):
                return machine.codes_gemm_s(m, n, k, batch)
            case MatrixProduct(m, n, k, batch):
                return machine.gemm_s(m, n, k, batch)
            case MemoryPass(moved_bytes):
                return machine.stream_s(moved_bytes)
            case Elementwise(kind, elements, element_bytes):
                return machine.elementwise_s(kind, elements, *(elements * b for b in element_bytes))
            case FusedAttention(rows, columns, head_size, products, seen):
                return machine.flash_s(rows, columns, head_size, products) * seen

    def message_s(self, message: Message) -> float:
        """Return the seconds for which kernels wait for a message. If the training program computes
        some kernels during the message, return only the time by which the message takes longer than
        these kernels."""
        group = self.groups[message.axis]
        size = message.whole_bytes / message.pieces
        if message.to_next:
            seconds = self.machine.send_s(size, crosses_nodes=group.nodes > 1)
            return self._exposed_s(seconds, message, self.sizes.software.overlap_pipeline)
        # the function for an all-to-all expects a size that includes the bytes that the rank sends
        # to itself
        if message.collective == "all_to_all":
            size *= group.ranks / (group.ranks - 1)
        priced = getattr(self.machine, f"{message.collective}_s")
        seconds = message.pieces * priced(size, group)
        software = self.sizes.software
        overlaps = software.overlap_tensor
        if message.axis == "context":
            overlaps = software.overlap_context
        return self._exposed_s(seconds, message, overlaps)

    def _exposed_s(self, seconds: float, message: Message, overlaps: bool) -> float:
        """Return the part of a message's time `seconds` for which no kernel runs. If `overlaps` is
        True, the kernels `message.behind` run during the message. Otherwise no kernel runs during
        the message."""
        if not overlaps:
            return seconds
        return max(0.0, seconds - sum(self.kernel_s(kernel) for kernel in message.behind))

    def seconds(self, kernels: Iterable[Kernel], sent: Iterable[Message]) -> Seconds:
        """Return the time that a rank needs for `kernels` and for the messages `sent`, including
        the host's time to launch them."""
        compute = 0.0
        launches = 0
        for kernel in kernels:
            if not kernel.priced:
                continue
            compute += self.kernel_s(kernel)
            launches += kernel.launches
        waited = dict.fromkeys(self.groups, 0.0)
        for message in sent:
            waited[message.axis] += self.message_s(message)
            launches += 1
        host_s = self.machine.host_s(launches)
        return Seconds(
            compute=compute,
            messages=waited["tensor"],
            host=host_s,
            context=waited["context"],
            expert=waited[EXPERTS],
        )


class LayerTimes(TensorRank):
    """The times of one layer of a model on a tensor-parallel rank. The layer has the kind `kind`,
    or, if `kind` is None, the kind of the last layer. If `by_source` is True, its experts compute
    the tokens of each source rank separately."""

    def __init__(
        self,
        machine: Machine,
        model: Model,
        layout: Layout,
        kind: LayerKind | None = None,
        *,
        by_source: bool = False,
    ) -> None:
        super().__init__(machine, sizes_on(machine, model, layout, by_source=by_source))
        if kind is None:
            kind = model.config.kind_of(model.config.layers - 1)
        self.rows = operators(describe.layer_of(model.config, kind))

    def _messages(self, phase: Phase) -> list[Message]:
        return list(messages(self.rows, self.sizes, phase))

    @cached_property
    def forward(self) -> Seconds:
        """Return the time of one layer's forward pass for one microbatch."""
        return self.seconds(forward_kernels(self.rows, self.sizes), self._messages("forward"))

    @cached_property
    def backward(self) -> Seconds:
        """Return the time of one layer's backward pass for one microbatch, without
        recomputation."""
        kernels = [*backward_kernels(self.rows, self.sizes), *weight_kernels(self.rows, self.sizes)]
        return self.seconds(kernels, self._messages("backward"))

    @cached_property
    def weights(self) -> Seconds:
        """Return the time of W, the part of a split backward that computes the gradients of
        weights. W consists of matrix products and, under sequence parallelism, gathers of their
        operands."""
        return self.seconds(weight_kernels(self.rows, self.sizes), self._messages("weights"))

    @cached_property
    def split_backward(self) -> Seconds:
        """Return the time of a split backward: the sum of I (gradient of the input) and W
        (gradients of the weights). In an unsplit backward, messages overlap with the computation of
        weight gradients. In a split backward, weight gradients are computed later, in W, so the
        messages of I do not overlap with this computation."""
        kernels = backward_kernels(self.rows, self.sizes)
        return self.seconds(kernels, self._messages("inputs")) + self.weights

    def recomputed(self, layout: Layout) -> Seconds:
        """Return the time of the recomputation at the beginning of the layer's backward pass, in
        the recomputation mode of `layout`.

        If the kept input of the layer is partitioned over tensor-parallel ranks, the time includes
        the gather of this input.
        """
        if layout.recompute == "full":
            if not layout.partition_activations:
                return self.forward
            whole = self.sizes.tokens * self.sizes.model.hidden * self.sizes.compute_bytes
            return self.forward + Seconds(0.0, self.machine.all_gather_s(whole, self.group))
        if layout.recompute != "selective":
            return Seconds()
        return self._selective

    @cached_property
    def _selective(self) -> Seconds:
        """Return the time of selective recomputation, which computes some operators of the layer
        again (`Operator.recomputed_selectively`)."""
        rows = [row for row in self.rows if row.recomputed_selectively]
        again = (kernel for row in rows for kernel in row.recomputed(self.sizes))
        return self.seconds(again, ())

    @property
    def launches(self) -> tuple[int, int]:
        """Return two numbers: how many kernels and messages the host launches in a layer's forward,
        and how many in its backward."""
        backward = [
            *backward_kernels(self.rows, self.sizes),
            *weight_kernels(self.rows, self.sizes),
        ]
        forward = list(forward_kernels(self.rows, self.sizes))
        return (
            sum(kernel.launches for kernel in forward) + len(self._messages("forward")),
            sum(kernel.launches for kernel in backward) + len(self._messages("backward")),
        )


def forward_kernels(rows: Iterable[Operator], sizes: Sizes) -> Iterator[Kernel]:
    """Yield the kernels that the operators `rows` run in a forward pass."""
    for row in rows:
        yield from row.forward(sizes)


def backward_kernels(
    rows: Iterable[Operator], sizes: Sizes, input_trains: bool = True
) -> Iterator[Kernel]:
    """Yield the kernels that the operators `rows` run in a backward pass, except those that compute
    the gradients of weights (`weight_kernels`).

    If `input_trains` is False, nothing before these operators is trained. The operators up to and
    including the first trained operator then compute no gradient of their input.
    """
    for row, trains in with_inputs(rows, input_trains):
        if trains:
            yield from row.backward(sizes)


def weight_kernels(rows: Iterable[Operator], sizes: Sizes) -> Iterator[Kernel]:
    """Yield the kernels that the operators `rows` run in a backward pass to compute the gradients
    of their weights."""
    for row in rows:
        yield from row.weights(sizes)


class EndTimes(TensorRank):
    """The times of the operators before the first layer and after the last layer, on a
    tensor-parallel rank.

    The host's time is left out, because it is small: a model has only one embedding and one head,
    but many layers.
    """

    def __init__(self, machine: Machine, model: Model, layout: Layout) -> None:
        super().__init__(machine, sizes_on(machine, model, layout))
        config = model.config
        self.embedding = describe.embedding(config, model.vocab_size)
        self.head = modules.head(config, model.vocab_size)
        self.head_input_trains = config.idle() < config.layers

    def _pass(self, kernels: Iterable[Kernel], sent: Iterable[Message]) -> Seconds:
        return replace(self.seconds(kernels, sent), host=0.0)

    @cached_property
    def embedding_forward(self) -> Seconds:
        sent = messages(self.embedding, self.sizes, "forward")
        return self._pass(forward_kernels(self.embedding, self.sizes), sent)

    @cached_property
    def embedding_backward(self) -> Seconds:
        """Return the time of the embedding's backward, which computes only the gradient of the
        table. In a split backward, all of this time therefore belongs to W (gradients of
        weights)."""
        if not any(row.trains for row in self.embedding):
            return Seconds()
        sent = messages(self.embedding, self.sizes, "backward")
        return self._pass(backward_kernels(self.embedding, self.sizes), sent)

    @cached_property
    def head_forward(self) -> Seconds:
        sent = messages(self.head, self.sizes, "forward")
        return self._pass(forward_kernels(self.head, self.sizes), sent)

    @cached_property
    def head_backward(self) -> Seconds:
        rows, sizes, trains = self.head, self.sizes, self.head_input_trains
        kernels = [*backward_kernels(rows, sizes, trains), *weight_kernels(rows, sizes)]
        return self._pass(kernels, messages(rows, sizes, "backward", trains))

    @cached_property
    def head_weights(self) -> Seconds:
        """Return the time that the head spends on W, the gradients of weights, in a split
        backward."""
        sent = messages(self.head, self.sizes, "weights", self.head_input_trains)
        return self._pass(weight_kernels(self.head, self.sizes), sent)

    @property
    def total_s(self) -> float:
        """Return the seconds of forward and backward of the embedding and of the head, together."""
        passes: Sequence[Seconds] = (
            self.embedding_forward,
            self.embedding_backward,
            self.head_forward,
            self.head_backward,
        )
        return sum(part.total for part in passes)
