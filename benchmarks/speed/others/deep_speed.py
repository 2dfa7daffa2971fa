"""DeepSpeed's ZeRO on CPU over gloo: plain torch's GPT, weights, batches and optimizer."""

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.case import Row, Variant
from benchmarks.speed.gpt_torch import Gpt, mean_loss
from benchmarks.speed.plain_torch import adam_settings, groups, microbatches


class DeepSpeedTrainer:
    """One rank of a DeepSpeed engine; what is not set has DeepSpeed's default.

    Its step sums, divides and updates behind the last microbatch. Gradients add up in the type of
    the weights: in bf16, where those are bf16 (`masters`).
    """

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        self.row, self.rank = row, rank
        deepspeed = _imported(rank)
        config = row.config
        model = Gpt(config, range(config.model.layers), row.case.vocab_size, autocast=False)
        parameters = list(model.parameters())
        adam = torch.optim.AdamW(groups(config, parameters), **adam_settings(config), fused=True)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=_settings(row, variant)
        )

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        return microbatches(self.row, self.rank, step)

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        losses = []
        for inputs, labels in batch:
            loss = mean_loss(self.engine(inputs), labels)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).double().mean())


def _imported(rank: int) -> Any:
    """The module. It asks the environment which device there is, and which one is its own."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    deepspeed.init_distributed("gloo")
    return deepspeed


def _settings(row: Row, variant: Variant) -> dict[str, Any]:
    case, config = row.case, row.config
    casts: dict[str, dict[str, Any]] = {
        "fp32": {},
        "masters": {"bf16": {"enabled": True}},
        "microbatch": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }
    return {
        "train_batch_size": case.global_size,
        "train_micro_batch_size_per_gpu": case.micro_size,
        "gradient_accumulation_steps": config.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": row.sizes.zero},
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW, as all sides have it
        "zero_force_ds_cpu_optimizer": False,
        **casts[variant.cast],
    }
