"""What is compared: one GPT, PTD-P and ZeRO-3 at 2 and 4 ranks on two nodes, some batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from ptdmpi.config import Config, Layout, synthetic_config
from ptdmpi.plan.shape.parameters import parameter_count

NODES = 2
PTD_P, ZERO_3 = "PTD-P", "ZeRO-3"


def layouts(ranks: int, batch: int) -> dict[str, Layout]:
    """Both ways on `ranks` ranks of two nodes.

    As in Table 2 of Narayanan et al. 2021: PTD-P has the tensor axis inside a node and the pipeline
    across, ZeRO-3 one microbatch of all that a rank gets. The pipeline has up to eight microbatches
    (a bubble of an eighth): more are too small for a CPU to be quick with.
    """
    return {
        PTD_P: Layout(tensor=ranks // NODES, pipeline=NODES, data=1, micro_size=max(1, batch // 8)),
        ZERO_3: Layout(tensor=1, pipeline=1, data=ranks, micro_size=batch // ranks, zero=3),
    }


@dataclass(frozen=True)
class Compared:
    """The model in the letters of the glossary, global batches in sequences, and how often."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    seq_length: int = 128
    vocab_size: int = 1024
    batches: Sequence[int] = (4, 8, 16, 32)
    rounds: int = 5  # a step of each way, in turn

    @property
    def zero_bytes(self) -> int:
        """What ZeRO-3 sends across the link in a step, both ways: a node lacks half of the weights
        before the forward and before the backward, and half of the gradients' sums."""
        model = next(iter(layouts(NODES, NODES).values()))
        return 3 * 4 * parameter_count(self.config(model, NODES).model, self.vocab_size)

    def config(self, layout: Layout, batch: int) -> Config:
        """Raises InputError as `resolve` does."""
        names = ("layers", "hidden", "heads", "seq_length")
        return synthetic_config(
            layout,
            {name: getattr(self, name) for name in names},
            run={"steps": 1000, "threads": 1},
            batch={"global_size": batch},
            precision={"compute": "fp32"},
            optimizer={"decay": "constant"},
        )
