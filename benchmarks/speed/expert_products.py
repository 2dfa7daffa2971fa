"""The time of a layer's experts, compared with the time of only their matrix products, called the
bare products.

The comparison is done twice: with the sizes of the row `moe`, and with many small experts. The
experts' time includes everything that a layer does with its experts: the router, the selection of
rows, the activation, the addition of results and all gradients. The bare products of an expert are
the matrix products of its forward and backward pass alone, for the same number of tokens. The
layer's experts and the bare products are measured in turn, in processor time of one thread, so that
other work on the machine hardly disturbs the ratio.

    python -m benchmarks.speed.expert_products
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.speed.case import MIXTURE, GptSizes
from ptdmpi.comm.communicator import OneRank
from ptdmpi.config import ModelConfig
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.mixture import Mixture, Router
from ptdmpi.model.experts.routing import Chosen, Routing
from ptdmpi.model.flat import Portion
from ptdmpi.model.kernels import Kernels, compute_by
from ptdmpi.model.parameters import data_types
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer.describe import layer
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.folds import operators

ROUNDS = 7
# other sizes of experts: many experts of a small width
MANY = {"experts": 64, "experts_per_token": 8, "expert_hidden": 176}


class Timed(Kernels):
    """The usual kernels, which also add up the processor time of their matrix products in
    `spent_s`."""

    spent_s = 0.0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b."""
        begin = time.process_time()
        result = super().linear(x, weight, bias)
        self.spent_s += time.process_time() - begin
        return result

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dy W."""
        begin = time.process_time()
        result = super().input_gradient(dy, weight)
        self.spent_s += time.process_time() - begin
        return result

    def add_weight_gradient(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x to `total`."""
        begin = time.process_time()
        super().add_weight_gradient(total, dy, x)
        self.spent_s += time.process_time() - begin


class ExpertTimes(NamedTuple):
    """The measured seconds: `experts_s` for all work of a layer's experts, `products_s` for the
    matrix products in this work, and `bare_s` for the bare products. `bare_forward_s` is the time
    of the bare products of the forward pass only, and `grouped_forward_s` the time of the same
    products by torch's grouped product."""

    experts_s: float
    products_s: float
    bare_s: float
    bare_forward_s: float
    grouped_forward_s: float


def least(work: Sequence[Callable[[], object]]) -> list[float]:
    """Call the functions in turn, ROUNDS times. Return the smallest processor time of each
    function, in seconds."""
    times = [[0.0] * ROUNDS for _ in work]
    for round_ in range(-1, ROUNDS):  # the first round is a warm-up, which is not counted
        for number, function in enumerate(work):
            begin = time.process_time()
            function()
            times[number][round_] = time.process_time() - begin
    return [min(each) for each in times]


def measure(model: ModelConfig, tokens: int) -> ExpertTimes:
    """Measure the experts of one layer of `model` for a microbatch of `tokens` tokens in float32,
    and return the times."""
    (row,) = (row for row in operators(layer(model)) if isinstance(row, MixExperts))
    router = Router(row)
    axis, own = TensorAxis(OneRank()), ExpertAxis()
    mixture = Mixture(row, Routing(model), axis, own, context=OneRank())
    named = [*router.named_parameters(prefix="router"), *mixture.named_parameters()]
    buffer = ParameterBuffer(named, data_types("fp32"), torch.device("cpu"), Portion())
    for weight in buffer.weights, *buffer.masters:
        weight.normal_(std=model.init_std)
    x = torch.randn(tokens, 1, model.hidden, requires_grad=True)
    chosen = Chosen()
    y = mixture(x, router, chosen)
    assert chosen.indices is not None, "the forward has chosen"
    dy = torch.randn_like(y)
    counts = chosen.indices.flatten().bincount(minlength=model.experts)
    ends = [0, *counts.cumsum(0).tolist()]
    bare = Bare(model, ends)
    timed = Timed()
    compute_by(mixture, timed)
    products: list[float] = []

    def experts() -> None:
        """Run the forward and the backward pass, and store the time of the matrix products."""
        timed.spent_s = 0.0
        mixture(x, router, Chosen()).backward(dy)
        products.append(timed.spent_s)

    experts_s, bare_s, forward_s, grouped_s = least(
        [experts, bare.both, bare.forward, bare.grouped]
    )
    return ExpertTimes(experts_s, min(products), bare_s, forward_s, grouped_s)


class Bare:
    """The bare matrix products of the experts of a layer. Expert e processes the tokens from
    `ends[e]` to `ends[e + 1]`."""

    def __init__(self, model: ModelConfig, ends: Sequence[int]) -> None:
        self.cuts = [slice(*pair) for pair in pairwise(ends)]
        self.offsets = torch.tensor(ends[1:], dtype=torch.int32)
        width = model.expert_hidden
        shapes = ((model.gates * width, model.hidden), (model.hidden, width))
        self.weights = [torch.randn(model.experts, *shape) for shape in shapes]
        self.sums = [torch.zeros_like(weight) for weight in self.weights]
        self.rows = [torch.randn(ends[-1], weight.shape[2]) for weight in self.weights]
        self.gradients = [torch.randn(ends[-1], weight.shape[1]) for weight in self.weights]

    def forward(self) -> None:
        """Compute the products of the forward pass: one product for each expert and each of its
        linears."""
        for weights, rows in zip(self.weights, self.rows, strict=True):
            for weight, cut in zip(weights, self.cuts, strict=True):
                _ = rows[cut] @ weight.t()

    def both(self) -> None:
        """Compute the products of the forward and of the backward pass."""
        self.forward()
        groups = (self.weights, self.sums, self.rows, self.gradients)
        for weights, sums, rows, dy in zip(*groups, strict=True):
            for weight, total, cut in zip(weights, sums, self.cuts, strict=True):
                _ = dy[cut] @ weight
                total.addmm_(dy[cut].t(), rows[cut])

    def grouped(self) -> list[Tensor]:
        """Compute the products of the forward pass by torch's grouped product, with one call for
        each linear."""
        return [
            torch._grouped_mm(rows, weights.transpose(1, 2), offs=self.offsets)
            for weights, rows in zip(self.weights, self.rows, strict=True)
        ]


def main() -> None:
    """Measure the time of a layer's experts for two sets of sizes, those of the row `moe` and MANY,
    and print a line for each set."""
    torch.set_num_threads(1)
    sizes = GptSizes()
    base = {"layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads}
    base["seq_length"] = sizes.seq_length
    for changes in ({}, MANY):
        model = ModelConfig.model_validate({**base, **MIXTURE, **changes})
        found = measure(model, sizes.micro_size * sizes.seq_length)
        print(
            f"E = {model.experts}, k = {model.experts_per_token}, width {model.expert_hidden}: "
            f"experts {found.experts_s * 1e3:.1f} ms, of which products "
            f"{found.products_s * 1e3:.1f} ms; bare products {found.bare_s * 1e3:.1f} ms "
            f"({found.bare_s / found.products_s:.0%} "
            f"of the products, {found.bare_s / found.experts_s:.0%} of all); forward alone: bare "
            f"{found.bare_forward_s * 1e3:.1f} ms, grouped {found.grouped_forward_s * 1e3:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
