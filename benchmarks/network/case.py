"""The training runs that are compared: one GPT with several batch sizes, trained with PTD-P and
with ZeRO-3 on 2 and 4 ranks of two nodes. PTD-P is the combination of pipeline, tensor and data
parallelism of Narayanan et al. 2021."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptdmpi.config import Config, Layout, synthetic_config
from ptdmpi.plan.shape.parameters import parameter_count

NODES = 2
PTD_P = "PTD-P"
ZERO_3 = "ZeRO-3"


def layouts(ranks: int, batch: int) -> dict[str, Layout]:
    """Return the layouts of PTD-P and ZeRO-3 on `ranks` ranks of two nodes.

    The layouts correspond to Table 2 of Narayanan et al. 2021. PTD-P has tensor parallelism inside
    a node and the pipeline across nodes. In the layout of ZeRO-3, all sequences of a rank are one
    microbatch. In the layout of PTD-P, the pipeline has at most eight microbatches (a bubble of one
    eighth), because smaller microbatches are slow on a CPU.
    """
    return {
        PTD_P: Layout(tensor=ranks // NODES, pipeline=NODES, data=1, micro_size=max(1, batch // 8)),
        ZERO_3: Layout(tensor=1, pipeline=1, data=ranks, micro_size=batch // ranks, zero=3),
    }


@dataclass(frozen=True)
class Compared:
    """The benchmark's settings: the model, the global batch sizes in sequences, and the number of
    rounds. In each round, every layout trains one step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    seq_length: int = 128
    vocab_size: int = 1024
    batches: Sequence[int] = (4, 8, 16, 32)
    rounds: int = 5

    @property
    def zero_bytes(self) -> int:
        """Return the bytes that ZeRO-3 sends over the link in a step, in both directions together.
        Each node receives half of the weights before the forward pass, half of the weights before
        the backward pass, and half of the gradient sums."""
        model = next(iter(layouts(NODES, NODES).values()))
        return 3 * 4 * parameter_count(self.config(model, NODES).model, self.vocab_size)

    def config(self, layout: Layout, batch: int) -> Config:
        """Return the configuration for a layout with the global batch size `batch`. Raises the
        errors that `resolve` raises."""
        names = ("layers", "hidden", "heads", "seq_length")
        return synthetic_config(
            layout,
            {name: getattr(self, name) for name in names},
            run={"steps": 1000, "threads": 1},
            batch={"global_size": batch},
            precision={"compute": "fp32"},
            optimizer={"decay": "constant"},
        )
