"""torchtitan's sharding and loss on CPU over gloo, around plain torch's GPT.

Its Trainer is left out: it asks for a CUDA device and imports Triton, which CPU builds of torch are
without. Its models have other layers, and their losses could not be compared.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt
from benchmarks.speed.plain_torch import Optimizer, microbatches


class TitanGpt(Gpt):
    """The GPT, its parts under the names by which torchtitan's sharding asks for them."""

    enable_weight_tying = False

    @property
    def tok_embeddings(self) -> nn.Module | None:
        return self.embedding

    @property
    def norm(self) -> nn.Module | None:
        return self.final_norm

    @property
    def lm_head(self) -> nn.Module | None:
        return self.head


class TitanTrainer:
    """One rank of torchtitan's training step: losses are sums over the tokens of the whole batch,
    and gradients are reduced into shards after each microbatch."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row, self.rank = row, rank
        config = row.config
        layers = range(config.model.layers)
        self.model = TitanGpt(config, layers, row.case.vocab_size, autocast=False)
        apply_fsdp_to_decoder(
            self.model,
            init_device_mesh("cpu", (row.sizes.data,), mesh_dim_names=("fsdp",)),
            param_dtype=torch.bfloat16 if variant.cast == "policy" else torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
        )
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # torchtitan's factor of 1 would be multiplied within the sum, which gloo cannot
                module.set_force_sum_reduction_for_comms(True)
        parameters = list(self.model.parameters())
        self.optimizer = Optimizer(config, parameters, masters=False, divided=False)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        return microbatches(self.row, self.rank, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        losses = []
        for inputs, labels in batch:
            loss = cross_entropy_loss(self.model(inputs), labels) / self.row.case.tokens
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        # of this rank's share of the tokens
        return float(torch.stack(losses).double().sum()) * self.row.sizes.data
