"""A trainer in plain torch over gloo, in which torch's own features implement each layout."""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed import ring
from benchmarks.speed.case import Row, Variant, synthetic_ids
from benchmarks.speed.gpt_torch import Block, Gpt, mean_loss
from ptdmpi.config import Config
from ptdmpi.plan.layout.stages import head_in_layers, split_layers
from ptdmpi.plan.schedule.orders import placement

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


def groups(config: Config, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the parameter groups for the optimizer. Only parameters with two dimensions have
    weight decay."""
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        # fused kernels do not accept a mixture of DTensors and other tensors
        key = (parameter.dim() > 1, isinstance(parameter, DTensor))
        members.setdefault(key, []).append(parameter)
    decay = config.optimizer.weight_decay
    return [
        {"params": together, "weight_decay": decay if decays else 0.0}
        for (decays, _), together in members.items()
    ]


def adam_settings(config: Config) -> dict[str, Any]:
    """Return the row's settings as arguments of torch.optim.AdamW."""
    options = config.optimizer
    betas = (options.beta1, options.beta2)
    return {"lr": options.learning_rate, "betas": betas, "eps": options.eps}


def microbatches(row: Row, data_rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels [sequences, tokens] for each microbatch of this data rank in a
    step."""
    size = row.case.micro_size
    own = row.config.microbatches * size
    mine = synthetic_ids(row, step)[data_rank * own : (data_rank + 1) * own]
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in mine.split(size)]


def layers_of_stages(row: Row) -> list[range]:
    """Return the layers of each pipeline stage, which are the same as in ptdmpi's stages."""
    sizes = row.sizes
    model = row.config.model
    placed = placement(sizes.schedule, sizes.pipeline, sizes.virtual)
    return split_layers(model.layers, placed, head_in_layers(model, row.case.vocab_size))


class Optimizer:
    """torch's fused AdamW optimizer. It updates `parameters`, or, if `masters` is True, fp32 master
    copies of the parameters.

    If `divided` is True, each data rank updates a part of the parameters and sends it to all other
    data ranks.
    """

    def __init__(
        self, config: Config, parameters: Sequence[nn.Parameter], *, masters: bool, divided: bool
    ) -> None:
        self.parameters = list(parameters)
        self.masters = None
        if masters:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        grouped = groups(config, self.masters or self.parameters)
        settings = {**adam_settings(config), "fused": True}
        self.adam: torch.optim.Optimizer
        if divided:
            self.adam = ZeroRedundancyOptimizer(grouped, torch.optim.AdamW, **settings)
        else:
            self.adam = torch.optim.AdamW(grouped, **settings)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, and remove their gradients."""
        if self.masters is None:
            self.adam.step()
            self.adam.zero_grad()
            return
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.adam.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)
            master.grad = None


class AccumulatingTrainer:
    """One rank of a trainer that runs microbatches in a loop: in a single process, or with
    DistributedDataParallel, FSDP2 or DTensor."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        config = row.config
        sizes = row.sizes
        self.row = row
        self.rank = rank
        self.variant = variant
        self.data_rank = rank if sizes.data > 1 else 0
        model = _stage_model(row, variant, range(config.model.layers))
        if sizes.tensor > 1:
            divide(model, init_device_mesh("cpu", (sizes.tensor,)), variant)
        self.positions = None
        if sizes.context > 1:
            self.positions = ring.positions(rank, sizes.context, row.case.seq_length)
            cut(model, self.positions)
        if sizes.shards_weights:
            shard(model, init_device_mesh("cpu", (sizes.data,)), variant)
        divided = sizes.shards_state and not sizes.shards_gradients
        self.optimizer = Optimizer(
            config, list(model.parameters()), masters=variant.cast == "masters", divided=divided
        )
        self.model: nn.Module = model
        if sizes.data * sizes.context > 1 and not sizes.shards_weights:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches for a step, with only the positions of this rank."""
        whole = microbatches(self.row, self.data_rank, step)
        if self.positions is None:
            return whole
        return [(ids[:, self.positions], labels[:, self.positions]) for ids, labels in whole]

    def step(self, step: int, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Train a step and return its loss."""
        losses = []
        with _step_autocast(self.variant):
            for number, (inputs, labels) in enumerate(batch):
                reduced = self.variant.reduce_each or number == len(batch) - 1
                with self._sync(reduced), self._loss_parallel():
                    loss = mean_loss(self.model(inputs), labels)
                    (loss / len(batch)).backward()
                losses.append(_local(loss.detach()))
        self.optimizer.step()
        return float(torch.stack(losses).double().mean())

    def _sync(self, reduced: bool) -> contextlib.AbstractContextManager:
        """Return a context manager for a backward pass. After the backward pass, gradients are
        reduced over the data ranks only if `reduced` is True."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(reduced)
        if reduced or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _loss_parallel(self) -> contextlib.AbstractContextManager:
        return loss_parallel() if self.variant.loss_parallel else contextlib.nullcontext()


class PipelineTrainer:
    """One rank of a trainer that uses torch.distributed.pipelining. The stages have the same layers
    as ptdmpi's stages."""

    def __init__(self, row: Row, variant: Variant, rank: int) -> None:
        config = row.config
        sizes = row.sizes
        self.row = row
        self.rank = rank
        self.variant = variant
        layers = layers_of_stages(row)
        count = len(layers)
        mine = placement(sizes.schedule, sizes.pipeline, sizes.virtual).stages_of(rank)
        self.first = 0 in mine
        self.last = count - 1 in mine
        models = [_stage_model(row, variant, layers[number]) for number in mine]
        stages = [
            PipelineStage(model, number, count, torch.device("cpu"))
            for number, model in zip(mine, models, strict=True)
        ]
        run = SCHEDULES[sizes.schedule]
        of_rank = stages if sizes.virtual > 1 else stages[0]
        self.schedule = run(of_rank, config.microbatches, mean_loss)
        parameters = [p for model in models for p in model.parameters()]
        self.optimizer = Optimizer(
            config, parameters, masters=variant.cast == "masters", divided=False
        )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of a step, each [sequences of the global batch, tokens]."""
        ids = synthetic_ids(self.row, step)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step(self, step: int, batch: tuple[Tensor, Tensor]) -> float | None:
        """Train a step. Return the loss of the step on the rank of the last stage."""
        inputs, labels = batch
        losses: list[Tensor] = []
        arguments = [inputs] if self.first else []
        targets = {"target": labels, "losses": losses} if self.last else {}
        with _step_autocast(self.variant):
            self.schedule.step(*arguments, **targets)
        self.optimizer.step()
        return float(torch.stack(losses).double().mean()) if self.last else None


def _stage_model(row: Row, variant: Variant, layers: range) -> Gpt:
    autocast = variant.cast == "microbatch"
    model = Gpt(row.config, layers, row.case.vocab_size, autocast)
    return model.bfloat16() if variant.cast == "masters" else model


def _step_autocast(variant: Variant) -> contextlib.AbstractContextManager:
    if variant.cast == "step":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _local(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def divide(model: Gpt, mesh: DeviceMesh, variant: Variant) -> None:
    """Divide a complete model over the tensor ranks of `mesh`, by torch's own classes for tensor
    parallelism (`torch.distributed.tensor.parallel`)."""
    between = Shard(1) if variant.sequence_parallel else Replicate()
    plan: dict = {"embedding.word": RowwiseParallel(input_layouts=Replicate())}
    if variant.sequence_parallel:
        plan["embedding"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=between
        )
        plan["final_norm"] = SequenceParallel()
    plan["head"] = ColwiseParallel(
        input_layouts=between,
        output_layouts=Shard(-1) if variant.loss_parallel else Replicate(),
        use_local_output=not variant.loss_parallel,
    )
    parallelize_module(model, mesh, plan)
    for block in model.layers.values():
        parallelize_module(block, mesh, _block_plan(between, variant.sequence_parallel))


def cut(model: Gpt, positions: Tensor) -> None:
    """Change a model so that it computes only the given positions of each sequence, with ring
    attention."""
    assert model.embedding is not None
    model.embedding.positions = positions
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.attention.core = ring.RingAttention.apply


def shard(model: Gpt, mesh: DeviceMesh, variant: Variant) -> None:
    """Shard an unsharded model over the data ranks of `mesh` by FSDP2: each layer separately, and
    all other parameters together."""
    policy = MixedPrecisionPolicy()
    if variant.cast == "policy":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _block_plan(between: Shard | Replicate, sequence_parallel: bool) -> dict:
    plan: dict = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        for part in ("attention", "mlp"):
            plan[f"{part}_norm"] = SequenceParallel()
            plan[part] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
    return plan


def trainer(row: Row, variant: Variant, rank: int) -> AccumulatingTrainer | PipelineTrainer:
    """Return the trainer in plain torch for a rank."""
    kind = PipelineTrainer if row.sizes.pipeline > 1 else AccumulatingTrainer
    return kind(row, variant, rank)


def connect_alone() -> None:
    """Create a process group of this one process, unless a group exists already. Some tools need a
    process group even on one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run(row: Row, store: str, serve: Callable[[int], None]) -> None:
    """Connect the ranks over gloo, and call `serve` with the number of this rank. The environment
    variables RANK and WORLD_SIZE have the number of this rank and the number of all ranks. The
    ranks find each other through the file `store`."""
    torch.set_num_threads(row.config.run.threads)
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    serve(rank)
    if ranks > 1:
        dist.destroy_process_group()
