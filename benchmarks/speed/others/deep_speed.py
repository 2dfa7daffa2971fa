"""DeepSpeed on CPU over gloo: its ZeRO and its pipeline, with the GPT, the initial weights, the
batches and the optimizer of `plain_torch`."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt, mean_loss
from benchmarks.speed.plain_torch import adam_settings, groups, layers_of_stages, microbatches


def trainer(row: Row, variant: Variant, rank: int) -> "ZeroTrainer | StageTrainer":
    """Return DeepSpeed's trainer for a rank."""
    kind = StageTrainer if row.sizes.pipeline > 1 else ZeroTrainer
    return kind(row, variant, rank)


class ZeroTrainer:
    """A DeepSpeed engine with DeepSpeed's defaults, on one rank.

    This trainer reduces gradients and updates the weights after the last microbatch. Gradients are
    added up in the type of the weights, which is bf16 with the cast "masters".
    """

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row = row
        self.rank = rank
        deepspeed = _imported(rank)
        config = row.config
        model = Gpt(config, range(config.model.layers), row.case.vocab_size, autocast=False)
        # use at least stage 1 of ZeRO: stage 0 would be DistributedDataParallel, which the rows of
        # plain torch measure
        self.engine = _engine(deepspeed, row, variant, model, zero=max(1, row.sizes.zero))

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches for a step."""
        return microbatches(self.row, self.rank, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Train a step and return its loss."""
        losses = []
        for inputs, labels in batch:
            loss = mean_loss(self.engine(inputs), labels)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).double().mean())


class StageTrainer:
    """DeepSpeed's PipelineModule with its 1F1B schedule, on one rank. The stages have the same
    layers as ptdmpi's stages. With bf16 weights, the gradients are added up in float32, and the
    master weights are float32."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row = row
        self.rank = rank
        deepspeed = _imported(rank)
        from deepspeed.pipe import LayerSpec, PipelineModule

        # DeepSpeed sees each stage as a single layer, so that a rank builds only its own stage
        stages = [
            LayerSpec(Gpt, row.config, layers, row.case.vocab_size, False)
            for layers in layers_of_stages(row)
        ]
        model = PipelineModule(
            stages, num_stages=len(stages), loss_fn=mean_loss, partition_method="uniform"
        )
        self.engine = _engine(deepspeed, row, variant, model, zero=0)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the microbatches for a step."""
        return microbatches(self.row, 0, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Train a step and return its loss."""
        return float(self.engine.train_batch(data_iter=iter(batch)))


def _engine(deepspeed: Any, row: Row, variant: Variant, model: nn.Module, *, zero: int) -> Any:
    config = row.config
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(groups(config, parameters), **adam_settings(config), fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam, config=_settings(row, variant, zero)
    )
    return engine


def _imported(rank: int) -> Any:
    """Import the module deepspeed, and return it. DeepSpeed reads the kind of device and this
    rank's device from the environment."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    deepspeed.init_distributed("gloo")
    return deepspeed


def _settings(row: Row, variant: Variant, zero: int) -> dict[str, Any]:
    case = row.case
    casts: dict[str, dict[str, Any]] = {
        "fp32": {},
        "masters": {"bf16": {"enabled": True}},
        "microbatch": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }
    return {
        "train_batch_size": case.global_size,
        "train_micro_batch_size_per_gpu": case.micro_size,
        "gradient_accumulation_steps": row.config.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        # use torch's fused AdamW, as all trainers do
        "zero_force_ds_cpu_optimizer": False,
        **casts[variant.cast],
    }
