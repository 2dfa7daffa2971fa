"""What a layout needs of a rank's memory, part by part, for any rank, at any ZeRO stage.

Activations are the inventories of `cost.memory`: of the published layer (Korthikanti et al.
2022) where attention writes its scores to memory, of this code's own layers otherwise. State
follows Rajbhandari et al. 2020 (arXiv 1910.02054, section 5), with a float32 gradient where the
summed one is narrower.
"""

from dataclasses import dataclass
from functools import cache
from operator import mul

from ptdmpi.config import (
    BatchConfig,
    Config,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from ptdmpi.plan.cost import counts, memory
from ptdmpi.plan.layout.layout import Layout
from ptdmpi.plan.machine.cluster import Cluster, Model

MASTER_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank at its peak, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # what one backward pass needs beside
    runtime: float  # context of the device, buffers of messages

    @property
    def standing(self) -> float:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer + self.runtime

    @property
    def total(self) -> float:
        return self.standing + self.activations + self.working


class Footprints:
    """Footprints of one model; what layouts have in common is counted once."""

    def __init__(self, model: Model, cluster: Cluster, precision: str) -> None:
        self.model, self.precision = model, precision
        self.software, self.runtime_bytes = cluster.software, cluster.device.runtime_bytes
        self.compute_bytes = memory.COMPUTE_BYTES[precision]
        self.of_microbatch = cache(self._of_microbatch)

    def peak(self, layout: Layout, layers: list[range], rank: int, microbatches: int) -> Footprint:
        """Of pipeline rank `rank` of a step of `microbatches`."""
        own, at_once = layers[rank :: layout.pipeline], in_flight(layout, microbatches, rank)
        kept_layer, working, embedding, head = self.of_microbatch(*_key(layout))
        sent = self._sent_bytes(layout)
        kept = kept_layer * sum(map(mul, at_once, map(len, own))) + sent * sum(at_once)
        if rank == 0:
            kept += at_once[0] * embedding
        if rank == layout.pipeline - 1:
            kept += at_once[-1] * (head - sent)
        elements = self.elements(layout, layers, rank)
        shards = [layout.data if layout.zero >= stage else 1 for stage in (1, 2, 3)]
        summed = self.software.gradient_bytes
        widened = MASTER_BYTES if summed < MASTER_BYTES else 0
        masters = 3 if self.compute_bytes < MASTER_BYTES else 2
        wide = max(MASTER_BYTES, self.compute_bytes)
        return Footprint(
            weights=elements * self.compute_bytes / shards[2],
            gradients=elements * (max(summed, self.compute_bytes) + widened) / shards[1],
            optimizer=elements * masters * wide / shards[0],
            activations=kept,
            working=working + self._whole_bytes(layout),
            runtime=self.runtime_bytes,
        )

    def _whole_bytes(self, layout: Layout) -> float:
        """What a backward pass has whole for a moment though it is sharded: the weight that ZeRO 3
        gathers at once, and its gradient before ZeRO 2 and 3 share it out."""
        if layout.data == 1 or layout.zero < 2:
            return 0.0
        config = self.model.config
        unit = layer_elements(self.model, layout.tensor)
        if self.software.zero_unit == "tensor":
            gates = 2 if config.activation == "swiglu" else 1
            unit = config.hidden * gates * config.ffn_hidden // layout.tensor
        gradient = max(self.software.gradient_bytes, self.compute_bytes)
        return unit * (gradient + self.compute_bytes * (layout.zero == 3))

    def kept_by_stage(self, layout: Layout, layers: list[range]) -> list[int]:
        """Bytes of activations that one microbatch leaves in each stage."""
        kept_layer, _, embedding, head = self.of_microbatch(*_key(layout))
        sent = self._sent_bytes(layout)
        kept = [len(own) * kept_layer + sent for own in layers]
        kept[0] += embedding
        kept[-1] += head - sent
        return kept

    def _sent_bytes(self, layout: Layout) -> int:
        """What a stage's rank keeps of a microbatch that it has sent on."""
        if not self.software.keeps_outputs or layout.pipeline == 1:
            return 0
        tokens = layout.micro_size * self.model.config.seq_length
        tokens //= layout.tensor if layout.sequence_parallel else 1
        return tokens * self.model.config.hidden * self.compute_bytes

    def elements(self, layout: Layout, layers: list[range], rank: int) -> int:
        """Parameters of a pipeline rank; the table counts on the first and on the last one."""
        config, t = self.model.config, layout.tensor
        table = -(-self.model.vocab_size // t) * config.hidden
        count = sum(map(len, layers[rank :: layout.pipeline])) * layer_elements(self.model, t)
        if rank == 0:
            count += table + counts.embedding_parameters(config)
        if rank == layout.pipeline - 1:
            count += counts.head_parameters(config)
            count += -(-counts.output_biases(config, self.model.vocab_size) // t)
            if not (rank == 0 and config.tie_embeddings):
                count += table
        return count

    def _of_microbatch(
        self, tensor: int, micro_size: int, sequence_parallel: bool, mode: str
    ) -> tuple[int, int, int, int]:
        """Bytes (kept by a layer, needed beside in its backward, by the embedding, by the head)."""
        config = self.model.config
        dropout = 0.1 if self.software.dropout else 0.0
        shape = config.model_copy(update={"dropout": dropout})
        built = Config.model_construct(
            model=shape,
            parallel=ParallelConfig(tensor=tensor, sequence_parallel=sequence_parallel, data=1),
            batch=BatchConfig(global_size=micro_size, micro_size=micro_size),
            precision=PrecisionConfig(compute=self.precision),
            recompute=RecomputeConfig(mode=mode),
        )
        sizes = memory.Sizes(built)
        if self.software.attention == "unfused":
            s, h, a = config.seq_length, config.hidden, config.heads
            items = memory.korthikanti_layer(s, micro_size, h, a, tensor, sequence_parallel)
        else:
            items = memory.layer_activations(sizes, mode)
        kept = memory.total_bytes(memory.kept(items, mode))
        vocab = self.model.vocab_size
        working = memory.backward_working_bytes(sizes, vocab, range(1))
        if mode != "none":
            working = max(working, memory.total_bytes(items) - kept)
        embedding = memory.total_bytes(memory.embedding_activations(sizes))
        head = memory.total_bytes(memory.head_activations(sizes, vocab))
        return kept, working, embedding, head


def _key(layout: Layout) -> tuple[int, int, bool, str]:
    return layout.tensor, layout.micro_size, layout.sequence_parallel, layout.recompute


def layer_elements(model: Model, tensor: int) -> int:
    """Parameters of one layer on one tensor rank; norms and biases behind a sum on every rank."""
    config = model.config
    h, kv = config.hidden, config.kv_heads * config.head_size
    gates = 2 if config.activation == "swiglu" else 1
    split = 2 * h * h + 2 * h * kv + (gates + 1) * h * config.ffn_hidden
    whole = 2 * (2 if config.norm == "layernorm" else 1) * h
    split += config.attention_bias * (h + 2 * kv) + config.mlp_bias * gates * config.ffn_hidden
    whole += (config.attention_bias + config.mlp_bias) * h
    return -(-split // tensor) + whole


def in_flight(layout: Layout, microbatches: int, rank: int) -> tuple[int, ...]:
    """Most microbatches of each chunk whose activations a pipeline rank keeps at once.

    1F1B: p - r (Narayanan et al. 2021, section 2.2.1). Interleaved: one more than the forwards of
    its warm-up, 2 (p - r - 1) + (v - 1) p, dealt to the chunks in groups of p. GPipe: all.
    """
    p, v, m = layout.pipeline, layout.virtual, microbatches
    if layout.schedule == "gpipe":
        return (m,) * v
    if v == 1:
        return (min(m, p - rank),)
    groups = -(-m // p) * p  # the order is that of m rounded up to whole groups
    total = min(groups * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    rounds, rest = divmod(total, p * v)
    counts = [rounds * p + min(p, max(0, rest - chunk * p)) for chunk in range(v)]
    return tuple(min(m, count) for count in counts)
