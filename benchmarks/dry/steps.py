"""Training steps of ptdmpi and of other trainers on the null GPU, and their counts."""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.dry.counting import Counting
from benchmarks.dry.device import NullGpu
from benchmarks.gpu import peers
from benchmarks.gpu.timing import fresh
from benchmarks.gpu.training import batches, drawn_there, engine_on
from ptdmpi.config import Config, resolve
from ptdmpi.model.batch import Placing
from ptdmpi.model.kernels import agreement, host
from ptdmpi.plan.cost.memory import MemoryModel

DEVICE = torch.device("cuda", 0)
WAIT_S = 10.0
LEFT_BYTES = 128 << 20  # libraries may keep this number of bytes for their own use


class Counts(NamedTuple):
    """The counts of one training step on the null GPU. `launches`, `moved_bytes`, `other_bytes`,
    `flops` and `roofline_s` are those of `DeviceWork`. `outside` is the number of launches outside
    of the operators of PyTorch's dispatcher. `cudnn` is the number of launches by cuDNN. `syncs` is
    the number of calls in which the host waits for the device. `peak_bytes` is the peak memory of
    all tensors during the step, and `state_bytes` is the memory of weights, gradients and optimizer
    states after the backward.
    """

    launches: float
    outside: float
    cudnn: float
    syncs: float
    moved_bytes: float
    other_bytes: float
    flops: float
    roofline_s: float
    peak_bytes: float
    state_bytes: float

    def minus(self, other: "Counts") -> "Counts":
        """Return these counts minus the counts `other`, field by field."""
        return Counts(*(mine - less for mine, less in zip(self, other, strict=True)))


def begin() -> None:
    """Free the device memory of earlier models. After a backward, autograd's thread may still hold
    tensors for a moment, so wait until most memory is free, at most `WAIT_S` seconds."""
    torch.cuda.init()
    fresh(DEVICE)
    end_s = time.monotonic() + WAIT_S
    while torch.cuda.memory_allocated() > LEFT_BYTES and time.monotonic() < end_s:
        time.sleep(0.1)
        fresh(DEVICE)


def counted(
    step: Callable[[], object],
    state_bytes: Callable[[], int] = torch.cuda.memory_allocated,
    *,
    by_operator: bool = True,
) -> Counts:
    """Run a training step twice, and return the counts of the second run. In the first run, PyTorch
    allocates its working memory, and the optimizer its states. The function `state_bytes` is called
    after the step, and returns the value of `Counts.state_bytes`. The default function returns all
    memory that is allocated after the step. This value is right only for a trainer that keeps its
    gradients after the step, because the state includes the gradients. If `by_operator` is False,
    bytes and FLOPs are not counted: the launches of compiled kernels do not go through PyTorch's
    dispatcher."""
    gpu = NullGpu()
    step()
    torch.cuda.reset_peak_memory_stats()
    counting = Counting(DEVICE.type, gpu.launched)
    launched, before = gpu.launched(), gpu.events()
    with counting if by_operator else contextlib.nullcontext():
        step()
    work = counting.work()
    return Counts(
        launches=gpu.launched() - launched,
        outside=gpu.launched() - launched - work.launches,
        cudnn=gpu.events().cudnn - before.cudnn,
        syncs=gpu.events().syncs - before.syncs,
        moved_bytes=work.moved_bytes,
        other_bytes=work.other_bytes,
        flops=work.flops,
        roofline_s=work.roofline_s,
        peak_bytes=torch.cuda.max_memory_allocated(),
        state_bytes=state_bytes(),
    )


def configuration(model: dict[str, Any], micro_size: int, microbatches: int) -> Config:
    """Return the configuration of training steps in bfloat16 on one rank, with `microbatches`
    microbatches of `micro_size` sequences."""
    tree = {
        "run": {"steps": 100},
        "model": model,
        "batch": {"global_size": micro_size * microbatches, "micro_size": micro_size},
        "precision": {"compute": "bf16"},
        "data": {"train": [{"path": "unused"}]},
    }
    return resolve(tree, 1)


def ours(config: Config, vocab_size: int) -> Counts:
    """Build ptdmpi's engine for `config` on the null GPU, and return the counts of one training
    step."""
    step = step_of_ours(config, vocab_size)
    with offered_attention():
        return counted(step)


def step_of_ours(config: Config, vocab_size: int) -> Callable[[], object]:
    """Build ptdmpi's engine for `config` on the null GPU, and return a function that does one
    training step."""
    begin()
    with drawn_there():
        engine = engine_on(config, vocab_size, DEVICE)
    placing = Placing(DEVICE)
    microbatches = batches(config, vocab_size, 0)
    return lambda: engine.step(0, placing.place(microbatches))


def offered_attention() -> AbstractContextManager[None]:
    """Return a context in which torch tries the attention backends that ptdmpi tries on this
    device. The first of these backends is cuDNN's, because the null GPU has no FlashAttention 3."""
    return agreement.trying(agreement.offered(DEVICE))


def workload_of(config: Config, vocab_size: int) -> peers.Workload:
    """Return the workload for another trainer: the model, the number of sequences in a step, and
    the size of a microbatch of `config`."""
    return peers.Workload(
        device=DEVICE,
        model=config.model,
        vocab_size=vocab_size,
        sequences=config.batch.global_size,
        micro_size=config.batch.micro_size,
    )


def theirs(
    workload: peers.Workload,
    size: peers.Size,
    loss_of: Callable[[Tensor], Tensor],
    model: torch.nn.Module,
) -> Counts:
    """Return the counts of a step of another trainer. The arguments are those of `peers.timed`,
    which returns the times of the same steps."""
    update = torch.optim.AdamW(model.parameters(), fused=True)
    microbatches = peers.ids_of(workload, size[0], 0)
    allocated: list[int] = []
    update.register_step_pre_hook(lambda *_: allocated.append(torch.cuda.memory_allocated()))
    return counted(
        lambda: peers.one_step(microbatches, loss_of, update), state_bytes=lambda: allocated[-1]
    )


def planned_bytes(config: Config, vocab_size: int, triton: Sequence[str] = ()) -> int:
    """Return the planner's prediction of the peak memory of ptdmpi's tensors on the first pipeline
    rank, in bytes. `triton` has the kinds of kernels that are computed in Triton."""
    adds_wide = host.adds_wide(DEVICE.type) and config.run.compile is not True
    kernels = {"triton": tuple(triton), "adds_wide": adds_wide}
    memory = MemoryModel.of(config, vocab_size, kernels=kernels, on_host=False)
    return memory.peak(config.layout, 0, config.microbatches).total
