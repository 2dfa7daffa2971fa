"""The tensors of a microbatch (`Microbatch`), the state of a microbatch on its way through the
pipeline stages of a rank (`MicrobatchPass`), and the transfer of microbatches to the device
(`Placing`)."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ptdmpi.comm.queues import Passed, copies_of
from ptdmpi.model.documents import Documents, Pairs
from ptdmpi.model.sequence.ahead import TokensAhead
from ptdmpi.model.sequence.positions import Positions

# in the memory of a slot (`_Slot`), each tensor begins at a multiple of this number of bytes
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class TeacherOutputs:
    """The outputs of a teacher model at s positions of b sequences. `ids` int64 [s, b, K] are the
    ids of the K most probable tokens at each position, and `logs` [s, b, K] are their
    log-probabilities in nats."""

    ids: Tensor
    logs: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "TeacherOutputs":
        """Return these outputs with the function `change` applied to both tensors."""
        return TeacherOutputs(change(self.ids), change(self.logs))


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of b sequences of s tokens, as the model uses it. `inputs` and `labels` [s, b]
    are token ids. `weights` [s, b] are the weights of the labels (None if all are 1), and `samples`
    [b] are the global sample numbers.

    If the model predicts the next token, `labels` is already shifted by one token: the label at
    position i is the token after the input at position i. A rank of the context axis can therefore
    select the same positions of inputs and labels. `ptdmpi.inference.tensors` makes a microbatch
    from rows of a dataset.

    `documents` is None unless a sequence contains several documents. In a masked language model
    with k masked positions in a sequence, labels and weights [k, b] belong to the `masked`
    positions [k, b]. In a model such as BERT, a sequence has one or two segments. `types` [s, b]
    are the segment numbers (token types) of the tokens. `order` [b] is 0 for two segments in their
    original order, 1 for two swapped segments, and -1 for a single segment. `pairs` are the pairs
    of answers that a preference loss compares. `teacher` has the stored outputs of a teacher model
    for the labels, if the run distills a teacher. `ahead` has the tokens of the modules for
    multi-token prediction, if the run trains such modules. `begins` is False if the positions do
    not include the first position of the sequences. Several ranks of the context axis have parts of
    the same sequences, and only the rank with the first position counts the sequences.

    `tokens` is the sum of the labels' weights, and `orders` is the number of sequences whose
    segment order contributes to the loss. Both numbers are computed on the host when the microbatch
    is made, because reading them from the device would make the host wait.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor | None
    samples: Tensor
    documents: Documents | None = None
    masked: Tensor | None = None
    types: Tensor | None = None
    order: Tensor | None = None
    pairs: Pairs | None = None
    teacher: TeacherOutputs | None = None
    ahead: TokensAhead | None = None
    begins: bool = True
    tokens: float = field(init=False)
    orders: int = field(init=False)

    def __post_init__(self) -> None:
        # sum in float64, because float32 is exact only up to 2^24, and large batches have more
        # tokens
        weights = self.weights
        tokens = self.labels.numel() if weights is None else weights.double().sum()
        orders = 0 if self.order is None else (self.order >= 0).sum()
        object.__setattr__(self, "tokens", float(tokens))
        object.__setattr__(self, "orders", int(orders))

    @classmethod
    def of_ids(cls, ids: Tensor, samples: Tensor) -> "Microbatch":
        """Return a microbatch of sequences [s + 1, b] of token ids, in which every label has the
        weight 1; `samples` [b] are the global sample numbers."""
        return cls(ids[:-1].contiguous(), ids[1:].contiguous(), None, samples)

    def with_ahead(self, modules: int) -> "Microbatch":
        """Return the same microbatch with the tokens for `modules` modules for multi-token
        prediction. The microbatch has all positions, and its tensors are on the host."""
        if not modules:
            return self
        ahead = TokensAhead.of(self.labels, self.weights, self.documents, modules)
        return replace(self, ahead=ahead)

    def at(self, positions: Positions) -> "Microbatch":
        """Return this microbatch with only the given `positions` of each sequence. The tensors must
        be on the host.

        `documents` keeps all positions, because queries see keys at all positions. Masked positions
        are converted to indices among this rank's positions. The weight of a masked position that
        is on another rank is 0 on this rank. Only the rank with the first position computes the
        loss of the segment order.
        """
        if positions.are_all:
            return self
        types = None if self.types is None else positions.of(self.types)
        inputs = positions.of(self.inputs)
        begins = bool(positions.numbers(len(inputs), inputs.device)[0] == 0)
        here = replace(self, inputs=inputs, types=types, begins=begins)
        if self.masked is not None:
            return here._with_masked_of(self, positions)
        weights = None if self.weights is None else positions.of(self.weights)
        pairs = None if self.pairs is None else self.pairs.at(positions)
        teacher = None if self.teacher is None else self.teacher.each(positions.of)
        ahead = None if self.ahead is None else self.ahead.at(positions)
        here = replace(here, labels=positions.of(self.labels), weights=weights)
        return replace(here, pairs=pairs, teacher=teacher, ahead=ahead)

    def _with_masked_of(self, whole: "Microbatch", positions: Positions) -> "Microbatch":
        """Return a copy of this microbatch with the masked positions and the segment order of
        `whole`. This microbatch has only the `positions` of this rank; `whole` is the same
        microbatch with all positions. In the result, a masked position is an index into this rank's
        positions."""
        assert whole.masked is not None
        count = len(self.inputs)
        numbers = positions.numbers(count, self.inputs.device)
        places = torch.full((len(whole.inputs),), -1).scatter(0, numbers, torch.arange(count))
        masked = places[whole.masked]
        weights = (masked >= 0).float()
        if whole.weights is not None:
            weights = weights * whole.weights
        order = whole.order
        if order is not None and not self.begins:
            order = torch.full_like(order, -1)
        return replace(self, masked=masked.clamp_min(0), weights=weights, order=order)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Microbatch":
        """Return this microbatch with `change` applied to each of its tensors. `tokens` and
        `orders` do not change."""
        changed = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                object.__setattr__(changed, name, change(value))
        if self.documents is not None:
            object.__setattr__(changed, "documents", self.documents.each(change))
        if self.pairs is not None:
            object.__setattr__(changed, "pairs", self.pairs.each(change))
        if self.teacher is not None:
            object.__setattr__(changed, "teacher", self.teacher.each(change))
        if self.ahead is not None:
            object.__setattr__(changed, "ahead", self.ahead.each(change))
        return changed


@dataclass(eq=False)
class MicrobatchPass:
    """The state of one microbatch on its way through the pipeline stages of a rank: the inputs and
    the results of its ops.

    `number` is the microbatch's number in the schedule. `step` is the number of the training step,
    which determines the dropout masks; None means evaluation, without dropout. The total loss is a
    weighted sum of losses. Before its gradient is computed, the total loss is multiplied by
    `scale`. `scale` is (loss scale) / n. The loss scale is 1 unless the precision is fp16. In the
    global batch, the task's loss is a sum of n terms, such as one term for each token. `weights`
    has the weight of each loss by name, except the first loss, whose weight is 1.

    The last stage sets two fields: `losses` (each loss by name, summed over the microbatch) and
    `total` (the weighted sum of these losses).
    """

    number: int
    batch: Microbatch
    step: int | None = None
    scale: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    total: Tensor | None = None

    def factors(self, names: Iterable[str]) -> dict[str, float]:
        """Return, for each of the losses `names`, the factor by which its gradient is multiplied.
        The result is a dict by name; a loss without a weight has no entry."""
        return {name: self.scale * self.weights[name] for name in names if name in self.weights}

    def take(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Store the values of the given losses. Return their weighted sum as a tensor with an
        autograd graph."""
        total = next(iter(losses.values()))
        for name, weight in self.weights.items():
            # the losses of routers are not in `losses`, because the backward of each router
            # computes their gradients itself
            if name in losses:
                total = total + weight * losses[name]
        self.losses = {name: loss.detach() for name, loss in losses.items()}
        self.total = total.detach()
        return total


@dataclass
class _Slot:
    """Memory for the microbatches of one step: `host` is on the host, and `there` is on the device.
    `free` and `copied` are events in the device's queues of work. After the event `free`, the
    device no longer uses this memory. After the event `copied`, the copy from host to device is
    complete."""

    host: Tensor
    there: Tensor
    free: Passed
    copied: Passed


class Placing:
    """The transfer of microbatches from the host to a device. All microbatches of a step are
    transferred in one copy. Two slots of memory (`_Slot`) are used in turn. While the device
    computes with one slot, the host fills the other slot, so neither the device nor the host waits.
    A tensor that `place` has returned may be used only by kernels that are started before the next
    call of `place`. If the device is the host, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = copies_of(device)
        self._ring: list[_Slot] = []

    def place(self, batches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return the microbatches with their tensors on the device. Only kernels that are started
        before the next call of `place` may use these tensors."""
        if self.device.type == "cpu":
            return list(batches)
        # the slot that the previous call of `place` filled is read only by computations that have
        # been issued before this call, so the slot is free when these computations are complete
        if self._ring:
            self._ring[-1].free = self._copies.computed()
        tensors: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            """Append `tensor` to the list `tensors`, and return it unchanged."""
            tensors.append(tensor)
            return tensor

        for batch in batches:
            batch.each(noted)
        ends = []
        end = 0
        for tensor in tensors:
            end += tensor.nbytes
            ends.append(end)
            end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        slot = self._next(end)
        for tensor, stop in zip(tensors, ends, strict=True):
            _room(slot.host, tensor, stop).copy_(tensor)
        with self._copies.behind(slot.free):
            slot.there[:end].copy_(slot.host[:end], non_blocking=True)
        slot.copied = self._copies.passed()
        slot.copied.computing_waits()
        stops = iter(ends)
        return [
            batch.each(lambda tensor: _room(slot.there, tensor, next(stops))) for batch in batches
        ]

    def _next(self, size: int) -> _Slot:
        """Return the slot of memory for this call of `place`, with at least `size` bytes. The two
        slots are used in turn. If the slot is too small, allocate a new one."""
        slot = self._ring.pop(0) if len(self._ring) == 2 else None
        if slot is not None:
            # the copy from this slot began two calls ago, so the host hardly ever waits for it
            slot.copied.host_waits()
        if slot is None or len(slot.host) < size:
            now = self._copies.computed()
            # The copy into the new memory waits for all computations issued so far (`now`), because
            # the new memory may have belonged to a freed tensor that one of these computations
            # still reads.
            there = torch.empty(size, dtype=torch.uint8, device=self.device)
            slot = _Slot(self._copies.locked(size), there, now, now)
        self._ring.append(slot)
        return slot


def _room(memory: Tensor, like: Tensor, stop: int) -> Tensor:
    """Return the `like.nbytes` bytes of `memory` that end at byte `stop`, as a tensor with the
    shape and type of `like`."""
    return memory[stop - like.nbytes : stop].view(like.dtype).view(like.shape)
