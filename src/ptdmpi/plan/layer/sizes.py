"""The sizes of tensors on one rank: numbers of positions and heads, and bytes of a number. The
symbols are s (sequence length), b (microbatch size), c (context-parallel size) and t
(tensor-parallel size)."""

from dataclasses import dataclass
from typing import Literal

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.plan.machine.cluster import TRAINER, Software, TritonKind

# The kinds of rows that a tensor [rows, width] may have on a rank, and their numbers:
#   whole      s b / c   every position of the microbatch that a context-parallel rank has
#   local      s b / ct  under sequence parallelism this rank's positions outside attention and MLP,
#                        otherwise the same as whole
#   predicted  k b       the k positions of each sequence that the head predicts
#   samples    b         one position of each sequence
Rows = Literal["whole", "local", "predicted", "samples"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model on one rank of a layout, for one microbatch.

    `precision` is the compute type, for example "bf16" or "fp32". `software` describes the training
    program, and `on_host` is True if the model runs on a CPU. `predictions` is the number of
    positions of a sample that the head predicts; if it is None, the number follows from the default
    fraction of masked positions. If `by_source` is True, experts compute the tokens of each source
    rank separately (`Layout.computes_by_source`).
    """

    model: ModelConfig
    layout: Layout
    precision: str
    software: Software = TRAINER
    on_host: bool = True
    predictions: int | None = None
    by_source: bool = False

    @property
    def tokens(self) -> int:
        """Return the number of positions of a microbatch on this context-parallel rank: s b / c."""
        return self.model.seq_length // self.layout.context * self.layout.micro_size

    @property
    def local_tokens(self) -> int:
        """Return the number of this rank's positions outside attention and MLP: `tokens`, or, under
        sequence parallelism, `tokens` divided by the tensor-parallel size."""
        if self.layout.sequence_parallel:
            return self.tokens // self.layout.tensor
        return self.tokens

    @property
    def predicted(self) -> int:
        """Return the number of positions of a microbatch at which this rank predicts tokens. In a
        masked language model, every context-parallel rank predicts all masked positions. In other
        language models, the number is `tokens`."""
        each = self.model.predictions() if self.predictions is None else self.predictions
        if not self.model.masked:
            each //= self.layout.context
        return each * self.layout.micro_size

    @property
    def keys(self) -> int:
        """Return the number of keys of a head in a microbatch over all context-parallel ranks
        together: s b, one key for each position."""
        return self.model.seq_length * self.layout.micro_size

    @property
    def local_heads(self) -> tuple[int, int]:
        """Return the numbers of query heads and of key heads of a tensor-parallel rank, rounded up,
        because a head is never divided."""
        return self.share(self.model.heads), self.share(self.model.kv_heads)

    @property
    def query_width(self) -> int:
        """Return the number of elements in the queries of one position on a tensor-parallel
        rank."""
        return self.local_heads[0] * self.model.head_size

    @property
    def key_value_size(self) -> int:
        """Return the number of elements of a key and its value in one head."""
        return self.model.head_size + self.model.value_size

    @property
    def gathers_early(self) -> bool:
        """Return True if keys and values are gathered over the context axis while the queries are
        computed."""
        gathers = self.layout.exchange == "all_gather" and self.software.overlap_context
        return gathers and self.model.divides_products and not self.model.latent

    @property
    def priced_heads(self) -> tuple[int, int]:
        """Return the numbers of query heads and of key heads from which the computing time of a
        tensor-parallel rank is predicted. Unlike `local_heads`, they are rounded down, so no time
        is counted for padded heads. If there are more tensor-parallel ranks than key heads, each
        rank counts one key head."""
        tensor = self.layout.tensor
        return self.model.heads // tensor, max(1, self.model.kv_heads // tensor)

    def rows(self, rows: Rows) -> int:
        """Return the number of rows that a tensor [rows, width] has on this rank if its rows are of
        the kind `rows`, for example "local"."""
        match rows:
            case "whole":
                return self.tokens
            case "local":
                return self.local_tokens
            case "predicted":
                return self.predicted
            case "samples":
                return self.layout.micro_size

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of one element of a weight or an activation."""
        return PRECISIONS[self.precision].compute.bytes

    @property
    def wide_bytes(self) -> int:
        """Return the bytes of one element of a softmax, a loss or a master weight, whose type is
        float32 or float64."""
        return PRECISIONS[self.precision].master.bytes

    @property
    def operand_bytes(self) -> int:
        """Return the bytes of one element of an operand of a matrix product."""
        return self.wide_bytes if self.software.wide_products else self.compute_bytes

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes of an activation between two layers, or of its gradient, on this
        rank."""
        return self.local_tokens * self.model.hidden * self.compute_bytes

    @property
    def divides_sequence(self) -> bool:
        """Return True if tensor-parallel ranks hold different positions outside attention and
        MLP."""
        return self.layout.sequence_parallel and self.layout.tensor > 1

    @property
    def drops(self) -> bool:
        """Return True if there is dropout on the outputs of sublayers."""
        return self.software.dropout or self.model.dropout > 0.0

    @property
    def fused_attention(self) -> bool:
        """Return True if the training program computes attention with kernels that keep scores on
        chip."""
        return self.software.attention == "flash"

    def by_triton(self, kind: TritonKind) -> bool:
        """Return True if the training program computes kernels of the kind `kind` in Triton."""
        return kind in self.software.triton

    def share(self, size: int) -> int:
        """Return `size` divided by the tensor-parallel size, rounded up."""
        return -(-size // self.layout.tensor)
