"""Time of one layer for one microbatch on one rank, and what all parts of a model are priced by.

Each part is a list of kernels: products of matrices, and kernels that are bound by the bytes they
move. Bytes per element stand beside each kernel; e is the size of an activation, g of a gradient.
The kernels are those of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3; Narayanan et
al. 2021, section 4.2: softmax with mask, bias with GeLU, and bias with dropout and addition fused).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ptdmpi.config import ModelConfig
from ptdmpi.config.layout import Layout
from ptdmpi.plan.machine.cluster import Model
from ptdmpi.plan.machine.kernels import Group, Machine
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.low_bit import unpacking

MASK_BYTES = 1  # an element of a dropout mask
# Megatron-LM of 2021 fuses scaling, mask and softmax for at most so many keys, and where so many
# divide the heads of a microbatch (megatron/model/fused_softmax.py).
FUSED_KEYS, FUSED_HEADS = 2048, 4
# Bytes per score of that kernel, and of those in its place, each forward and backward: to float32,
# scale, mask, softmax, to half; going back the masked gradient is copied first.
FUSED_SOFTMAX, PLAIN_SOFTMAX = (3.0, 4.0), (6 + 8 + 9 + 8 + 6, 6 + 12 + 8 + 9 + 8 + 6)


@dataclass(frozen=True)
class Seconds:
    """Time in kernels, in messages over the tensor axis that the kernels wait for, and of the host
    that launches both. What the host has no time left for is computed later."""

    compute: float = 0.0
    messages: float = 0.0
    host: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.compute + other.compute, self.messages + other.messages, self.host + other.host
        )

    def __mul__(self, times: int) -> "Seconds":
        return Seconds(self.compute * times, self.messages * times, self.host * times)

    @property
    def total(self) -> float:
        return max(self.compute + self.messages, self.host)

    @property
    def launched(self) -> "Seconds":
        """The same with the time that the device waits for its host in `compute`."""
        waits_s = max(0.0, self.host - self.compute - self.messages)
        return Seconds(self.compute + waits_s, self.messages)


@dataclass(frozen=True)
class LocalLinear:
    """A product with a weight of (inputs, outputs) on this rank, which trains or not."""

    inputs: int
    outputs: int
    bias: bool
    trains: bool = True


class TensorRank:
    """One tensor rank of `layout`, one microbatch at a time: the kernels and messages that every
    part of a model has."""

    def __init__(self, machine: Machine, model: Model, layout: Layout) -> None:
        self.machine, self.layout = machine, layout
        self.model, self.software = model.config, machine.cluster.software
        t = layout.tensor
        self.e, self.g = machine.element_bytes, self.software.gradient_bytes
        self.tokens = self.model.seq_length * layout.micro_size
        self.local_tokens = self.tokens // (t if layout.sequence_parallel else 1)
        self.mask = MASK_BYTES if self.software.dropout else 0
        self.group = Group(t, min(t, machine.cluster.node.devices))

    def _norm(self, *element_bytes: float, backward: bool = False) -> float:
        elements = self.local_tokens * self.model.hidden
        kind = self.model.norm + ("_backward" if backward else "")
        moved = (elements * size for size in element_bytes)
        return self.machine.elementwise_s(kind, elements, *moved)

    def _stream(self, *moved_bytes: float) -> float:
        return sum(self.machine.stream_s(amount) for amount in moved_bytes)

    @cached_property
    def _unpacked(self) -> tuple[float, int]:
        """Bytes and kernels of the values of a layer's frozen matrices in few bits, which each pass
        makes anew for its products."""
        cluster, tensor = self.machine.cluster, self.layout.tensor
        return unpacking(self.model, tensor, self.e, cluster.on_host)

    @cached_property
    def unpacking_s(self) -> float:
        """Seconds of that, in each pass."""
        moved, _ = self._unpacked
        return self._stream(moved) if moved else 0.0

    @cached_property
    def boundary_bytes(self) -> int:
        """The tensor between two layers on this rank."""
        return self.local_tokens * self.model.hidden * self.e

    @cached_property
    def _whole_bytes(self) -> int:
        return self.tokens * self.model.hidden * self.e

    @cached_property
    def _gather_s(self) -> float:
        return self.machine.all_gather_s(self._whole_bytes, self.group)

    @cached_property
    def _scatter_s(self) -> float:
        return self.machine.reduce_scatter_s(self._whole_bytes, self.group)

    @cached_property
    def _sum_s(self) -> float:
        """Seconds to sum an activation over the tensor axis; with sequence parallelism a
        reduce-scatter and an all-gather in its place (Korthikanti et al. 2022, section 4.2.2)."""
        if self.layout.sequence_parallel:
            return self._gather_s + self._scatter_s
        return self.machine.all_reduce_s(self._whole_bytes, self.group)

    @property
    def _message_launches(self) -> int:
        """Sums of a forward, or scatters and gathers in their place."""
        return (self.layout.tensor > 1) * (4 if self.layout.sequence_parallel else 2)

    def _linear_backward(self, weight: LocalLinear, tokens: int) -> float:
        """Input gradient, weight gradient, the latter added up over microbatches, bias gradient."""
        product = self.machine.gemm_s(tokens, weight.inputs, weight.outputs)
        if not weight.trains:
            return product
        bias = self._stream(tokens * weight.outputs * self.e) if weight.bias else 0.0
        return product + self._weight_gradient(weight, tokens) + bias

    def _weight_gradient(self, weight: LocalLinear, tokens: int) -> float:
        if not weight.trains:
            return 0.0
        product = self.machine.gemm_s(weight.inputs, weight.outputs, tokens)
        # the product is read, the sum so far read and written; a product that adds by itself, in
        # the sum's own type, has it in its own time
        if self.software.adds_in_place and self.e == self.g:
            return product
        return product + self._stream(weight.inputs * weight.outputs * (self.e + 2 * self.g))


def _beside(model: ModelConfig, tensor: int, number: int | None) -> Iterator[LocalLinear]:
    """The products of a layer's adapters, as a tensor rank has them."""
    for part in parameters.layer(model, number).values():
        if isinstance(part, parameters.LowRankPair):
            inputs, outputs = part.local(tensor)
            yield LocalLinear(inputs, part.rank, False)
            yield LocalLinear(part.rank, outputs, False)


class LayerTimes(TensorRank):
    """One layer of a model on a tensor rank, that of this number; None: the last one."""

    def __init__(
        self, machine: Machine, model: Model, layout: Layout, number: int | None = None
    ) -> None:
        super().__init__(machine, model, layout)
        config, t = model.config, layout.tensor
        self.heads, self.ffn = config.heads // t, config.ffn_hidden // t
        # ranks beyond the key heads share one of them
        self.kv_heads = max(1, config.kv_heads // t)
        self.qkv, self.out = self._local("attention.qkv"), self._local("attention.out")
        self.up, self.down = self._local("mlp.up"), self._local("mlp.down")
        self.beside = tuple(_beside(config, t, number))

    @property
    def linears(self) -> tuple[LocalLinear, ...]:
        return self.qkv, self.out, self.up, self.down, *self.beside

    def _local(self, name: str) -> LocalLinear:
        """A linear of the layer as a tensor rank has it."""
        part = parameters.layer(self.model)[name]
        assert isinstance(part, parameters.Linear)
        return LocalLinear(*part.local(self.layout.tensor), part.bias, part.trains)

    def _activation(self, *element_bytes: float, backward: bool = False) -> float:
        elements = self.tokens * self.ffn
        kind = self.model.activation + ("_backward" if backward else "")
        moved = (elements * size for size in element_bytes)
        return self.machine.elementwise_s(kind, elements, *moved)

    def _attention_core(self, backward: bool) -> float:
        """From query, key, value to the heads' outputs. Unfused, a scores tensor of a s^2 b / t
        elements: the mask spares half the reads of the softmax kernel, not the writes. Capped
        scores are unfused everywhere."""
        b, s = self.layout.micro_size, self.model.seq_length
        batch, d, e = b * self.heads, self.model.head_size, self.e
        capped = self.model.attention_softcap > 0.0
        if self.software.attention == "flash" and not capped:
            # FlashAttention keeps no scores (Dao et al. 2022, arXiv 2205.14135, algorithm 4);
            # backward: the scores again, and two products for each of the two forward ones
            whole_s = self.machine.flash_s(batch * s, s, d, 5 if backward else 2)
            return whole_s * self._seen_share
        scores = batch * s * s
        gemm = self.machine.gemm_s
        fused = not capped and s <= FUSED_KEYS and batch % FUSED_HEADS == 0
        softmax = (FUSED_SOFTMAX if fused else PLAIN_SOFTMAX)[backward]
        streams = [scores * softmax * e / 2]  # the table counts bytes of 2-byte numbers
        if self.software.dropout:
            streams.append(scores * (2 * e + self.mask))
        # forward Q K^T, P V; backward dO V^T, then P^T dO, dS K and dS^T Q
        if backward:
            products = gemm(s, s, d, batch) + 3 * gemm(s, d, s, batch)
        else:
            products = gemm(s, s, d, batch) + gemm(s, d, s, batch)
        return products + self._stream(*streams)

    @cached_property
    def _seen_share(self) -> float:
        """Scores of a causal layer that lie in its window, the mean over the layers: of a window of
        r s keys, 1 - (1 - r)^2."""
        s, window = self.model.seq_length, self.model.sliding_window
        if not 0 < window < s:
            return 1.0
        sliding = (s - self.model.mean_keys) / (s - window)
        return 1.0 - sliding * (1.0 - window / s) ** 2

    def _norms(self, *element_bytes: float, backward: bool = False) -> float:
        """All norms of a layer, those of queries and keys among them."""
        count = 4 if self.model.block_norm == "sandwich" else 2
        seconds = count * self._norm(*element_bytes, backward=backward)
        if self.model.qk_norm:
            elements = self.tokens * (self.heads + self.kv_heads) * self.model.head_size
            kind = self.model.norm + ("_backward" if backward else "")
            moved = (elements * size for size in element_bytes)
            seconds += self.machine.elementwise_s(kind, elements, *moved)
        return seconds

    @cached_property
    def core_forward_s(self) -> float:
        return self._attention_core(backward=False)

    @cached_property
    def forward(self) -> Seconds:
        """Forward pass of one layer."""
        e, t, gemm_s = self.e, self.tokens, self.machine.gemm_s
        local = self.local_tokens * self.model.hidden
        products = self.unpacking_s + sum(gemm_s(t, w.outputs, w.inputs) for w in self.linears)
        if self.qkv.bias and self.software.attention == "unfused":  # of query, key, value
            products += self._stream(t * self.qkv.outputs * 2 * e)
        # of each kernel what it reads and writes per element: a norm its input and its output
        norms = self._norms(2 * e)
        merged = self._stream(t * self.out.inputs * 2 * e)  # heads side by side again
        activation = self._activation((self.model.gates + 1) * e)
        # branch and residual are read, their sum is written, and where dropout acts its mask
        residuals = 2 * self._stream(local * (3 * e + self.mask))
        compute = products + norms + merged + activation + residuals + self.core_forward_s
        return Seconds(compute, 2 * self._sum_s, self.machine.host_s(self._forward_launches))

    @cached_property
    def backward(self) -> Seconds:
        """Backward pass of one layer, without anything that is recomputed."""
        e, t = self.e, self.tokens
        local = self.local_tokens * self.model.hidden
        # a norm's input gradient (dy, x; dx), those of its weights (dy, x), and the sum of the
        # former with the gradient that came past the block
        norms = self._norms(3 * e, 2 * e, 3 * e, backward=True)
        merged = self._stream(t * self.out.inputs * 2 * e, t * self.qkv.outputs * 2 * e)
        activation = self._activation((2 * self.model.gates + 1) * e, backward=True)
        # without dropout the gradient of a sum is the sum's own: nothing is moved
        residuals = 2 * self._stream(local * (2 * e + self.mask)) if self.mask else 0.0
        linears = self.unpacking_s + sum(self._linear_backward(w, t) for w in self.linears)
        compute = norms + merged + activation + residuals + linears
        compute += self._attention_core(backward=True)
        host_s = self.machine.host_s(self._backward_launches)
        return Seconds(compute, self._backward_messages_s(), host_s)

    @cached_property
    def weights(self) -> Seconds:
        """What a split backward leaves for its W. With sequence parallelism an operand of each
        linear is gathered for it: the column-parallel ones' input, the others' gradient."""
        compute = sum(self._weight_gradient(w, self.tokens) for w in self.linears)
        gathers = 4 if self.layout.sequence_parallel else 0
        launches = gathers * (self.layout.tensor > 1) + self._weight_launches
        return Seconds(compute, gathers * self._gather_s, self.machine.host_s(launches))

    @cached_property
    def split_backward(self) -> Seconds:
        """Both parts of a split backward: no weight's gradient hides the sums of the first one."""
        compute = self.backward.compute - self.weights.compute
        host_s = self.machine.host_s(self._backward_launches - self._weight_launches)
        return Seconds(compute, 2 * self._sum_s, host_s) + self.weights

    def _backward_messages_s(self) -> float:
        """Two sums, in front of each column-parallel linear, whose weight gradient may hide its
        own. With sequence parallelism the inputs of these linears are gathered again, behind their
        input gradients (Korthikanti et al. 2022, section 4.2.2)."""
        # only what outlasts the product that runs beside it is waited for
        messages, t, hides = 0.0, self.tokens, self.software.overlap_tensor
        for weight in (self.qkv, self.up):
            sum_s = self._sum_s
            if self.layout.sequence_parallel:
                behind_s = self.machine.gemm_s(t, weight.inputs, weight.outputs) if hides else 0.0
                messages += self._gather_s + max(0.0, self._gather_s - behind_s)
                sum_s = self._scatter_s
            hidden_s = self.machine.gemm_s(weight.inputs, weight.outputs, t) if hides else 0.0
            messages += max(0.0, sum_s - hidden_s)
        return messages

    def recomputed(self, layout: Layout) -> Seconds:
        """What the backward pass computes again first; a partitioned input is gathered for it."""
        mode = layout.recompute
        if mode == "full":
            gather_s = self._gather_s if layout.partition_activations else 0.0
            return self.forward + Seconds(0.0, gather_s)
        if mode != "selective":
            return Seconds()
        return Seconds(self.core_forward_s, host=self.machine.host_s(self._core_launches(False)))

    # -- what the host launches ------------------------------------------------------------------

    @property
    def launches(self) -> tuple[int, int]:
        """Kernels and messages of a forward and of a backward."""
        return self._forward_launches, self._backward_launches

    @property
    def _unfused(self) -> bool:
        return self.software.attention == "unfused" or self.model.attention_softcap > 0.0

    def _core_launches(self, backward: bool) -> int:
        """Products, softmax and dropout of attention, or one kernel."""
        if not self._unfused:
            return 1
        return (4 if backward else 2) + 1 + self.software.dropout

    @property
    def _norm_count(self) -> int:
        return (4 if self.model.block_norm == "sandwich" else 2) + self.model.qk_norm

    @property
    def _forward_launches(self) -> int:
        """As kernels stand in `forward`; heads side by side, activation, residuals: 1 + 1 + 2."""
        bias = int(self.qkv.bias and self.software.attention == "unfused")
        kernels = self._unpacked[1] + len(self.linears) + bias + self._norm_count + 1 + 1 + 2
        return kernels + self._core_launches(False) + self._message_launches

    @property
    def _backward_launches(self) -> int:
        inputs = sum(1 + weight.bias * weight.trains for weight in self.linears)
        kernels = self._unpacked[1] + inputs + self._weight_launches + 3 * self._norm_count + 2 + 1
        kernels += 2 * (self.mask > 0) + self._core_launches(True)
        gathers = 2 * (self.layout.tensor > 1) * self.layout.sequence_parallel
        return kernels + self._message_launches + gathers

    @property
    def _weight_launches(self) -> int:
        """A product, and the kernel that adds it where it does not do so itself."""
        adds = not (self.software.adds_in_place and self.e == self.g)
        return sum(weight.trains for weight in self.linears) * (1 + adds)
