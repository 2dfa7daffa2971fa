"""Each row of a model's embedding and head against reality: its parameters, what it keeps, its
FLOPs and its messages.

The model's own modules run: `Embedding`, and the output with the loss. One run is cut at each row.
Another one is whole, and is compared with the planner's sums, so that no work outside of the rows
is missed. All labels count: the float64 copy of a batch's weights, which only fp64 keeps, has no
account.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, Layout
from ptdmpi.model import transformer
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.kernels import compute_by
from ptdmpi.model.operators import Context
from ptdmpi.model.output import heads
from ptdmpi.model.output.losses import ORDER
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.dropout import HiddenDropout
from ptdmpi.model.stage import TIED_NAME, Stage
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.cost.layer import backward_kernels, forward_kernels, weight_kernels
from ptdmpi.plan.cost.stage_memory import StageMemory
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.account import total_bytes
from ptdmpi.plan.layer.elementwise import Activate
from ptdmpi.plan.layer.ends import (
    CrossEntropy,
    SelectPositions,
    Tanh,
)
from ptdmpi.plan.layer.folds import messages, parts_of
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.sizes import Sizes
from tests._configs import small
from tests._layers import Placed, positions, random_tensor
from tests._rows import (
    ADAPTED,
    SHAPES,
    Counted,
    chosen_kernels,
    foreseen_messages,
    held,
    program,
)

S, B, H = 24, 2, 32
VOCAB_SIZE = 61  # no number of ranks divides it
TASK_LABELS = {"task.kind": "classification", "task.labels": ["no", "maybe", "yes"]}
BERT = {"model.kind": "bert"}
FROZEN = {"adapt.method": "lora", "adapt.rank": 2, "adapt.first_layer": 1}  # all layers
ENDS = {
    **SHAPES,
    **ADAPTED,
    "wide gpt": {"model.mup_base_hidden": 8},
    "untied gpt": {"model.tie_embeddings": False},
    "tied llama": {"model.kind": "llama", "model.tie_embeddings": True},
    "capped llama": {"model.kind": "llama", "model.logit_softcap": 30.0},
    "gpt that rotates": {"model.positions": "rope"},
    "untied bert": {**BERT, "model.tie_embeddings": False, "model.dropout": 0.1},
    "bert of one segment": {**BERT, "model.sentence_order": False, "model.token_types": 0},
    "bert without a transform": {**BERT, "model.output_head": "linear"},
    "bert without biases": {**BERT, "model.bias": False},
    "gpt that classifies": TASK_LABELS,
    "llama that classifies": {"model.kind": "llama", **TASK_LABELS},
    "bert that classifies": {**BERT, **TASK_LABELS},
    "bert that classifies with dropout": {**BERT, **TASK_LABELS, "model.dropout": 0.1},
    "bert that chooses": {**BERT, "task.kind": "choice", "task.choices": 2},
    "frozen gpt that classifies": {**FROZEN, **TASK_LABELS},
    "frozen bert that classifies": {**BERT, **FROZEN, **TASK_LABELS},
    "adapted llama that classifies": {**ADAPTED["lora"], **TASK_LABELS},
    "adapted bert": {**BERT, **FROZEN, "adapt.first_layer": 0},
    "adapted bert without a transform": {
        **BERT,
        **FROZEN,
        "adapt.first_layer": 0,
        "model.output_head": "linear",
        "model.sentence_order": False,
    },
}


@dataclass
class Ends:
    """A stage with embedding and output, its microbatch, and the sizes of its account."""

    placed: Placed
    sizes: Sizes
    batch: Microbatch
    context: Context
    comm: Communicator  # whose messages are counted

    @property
    def stage(self) -> Stage:
        """Return the stage, which is the whole model."""
        return self.placed.layer

    def descriptions(self) -> dict[str, tuple[Operator, ...]]:
        """Return the rows of both ends."""
        model = self.sizes.model
        return {
            "embedding": describe.embedding(model, VOCAB_SIZE),
            "head": describe.head(model, VOCAB_SIZE),
        }

    def module(self, end: str) -> nn.Module:
        """Return the module that has the modules of an end's rows under the rows' names."""
        return self.stage.embedding if end == "embedding" else self.stage

    def input_trains(self, end: str) -> bool:
        """Return True if a part before this end trains."""
        model = self.sizes.model
        return end == "head" and model.idle() < model.layers

    def run(self, end: str) -> Tensor:
        """Run the forward of an end: return the embedding's output, or the loss."""
        stage, batch = self.stage, self.batch
        if end == "embedding":
            return stage.embedding(batch.inputs, self.context, batch.types)
        whole = random_tensor("x", (S, B, H), self.sizes.precision)
        here = self.context.positions.of(whole)
        x = positions(here, self.placed.axis).clone().requires_grad_(self.input_trains(end))
        losses = stage.output.losses(batch, stage.output.normalized(x), self.context)
        return MicrobatchPass(0, batch, weights={ORDER: 0.5}).take(losses)

    def given(self) -> set[int]:
        """Return the storages that are there without the ends: of weights and of the batch."""
        tensors = [*self.stage.parameters()]
        self.batch.each(lambda tensor: tensors.append(tensor) or tensor)
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def ends_of(
    name: str,
    axis: TensorAxis,
    precision: str = "fp64",
    *,
    widens: bool = False,
    context: ContextAxis | None = None,
) -> Ends:
    """Return a model with known weights and a microbatch; `widens` as in `chosen_kernels`.

    `context` is an axis that cuts the sequence. Its messages are counted instead of the tensor
    axis'."""
    sizes = {"model.hidden": H, "model.heads": 8, "model.seq_length": S, "model.layers": 1}
    config = small({**sizes, "batch.micro_size": B, **ENDS[name]})
    stage = Stage(config, VOCAB_SIZE, range(1), axis, context=context)
    placed = Placed(stage, axis, precision)
    here = stage.positions
    kernels = chosen_kernels(precision, widens)
    compute_by(stage, kernels)
    layout = Layout(
        tensor=axis.size,
        pipeline=1,
        data=1,
        micro_size=B,
        sequence_parallel=axis.sequence_parallel,
        context=here.size,
    )
    if context is not None:
        layout = replace(layout, context_method=context.method)
    stream = RandomStream.of(1, 2, torch.arange(B), here) if config.model.dropout else None
    return Ends(
        placed,
        Sizes(config.model, layout, precision, program(kernels, precision)),
        microbatch(config).at(here),
        Context(stream, positions=here),
        axis.comm if context is None else context.comm,
    )


def microbatch(config: Config) -> Microbatch:
    """Return a microbatch of random tokens, with what the model's output asks of it."""
    model, generator = config.model, torch.Generator().manual_seed(3)

    def numbers(end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=generator)

    ids, samples = numbers(VOCAB_SIZE, S, B), torch.arange(B)
    labels, masked, order = numbers(VOCAB_SIZE, S, B), None, None
    if model.classifies:
        labels, masked = numbers(2, 1, B // config.task.sequences), numbers(S, 1, B)
    elif model.masked:
        asked = model.predictions()
        labels, masked = labels[:asked].clone(), numbers(S, asked, B)
    if model.sentence_order:
        order = numbers(2, B)
    types = numbers(2, S, B) if model.token_types else None
    return Microbatch(ids, labels, None, samples, masked=masked, types=types, order=order)


class Run:
    """What a row, or an end, did: storages that stay, FLOPs and messages, forward and backward."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.flops = [0, 0]
        self.messages: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    @contextmanager
    def counted(self, comm: Communicator, phase: int) -> Iterator[None]:
        """Count FLOPs and messages of the forward (`phase` 0) or of the backward (1)."""
        with Counted(comm) as counted:
            yield
        self.flops[phase] += counted.flops
        self.messages[phase].update(counted.messages)

    @contextmanager
    def keeping(self, given: Set[int]) -> Iterator[Callable[[Tensor], None]]:
        """Note what autograd saves inside. Return a function for outputs, which notes what the
        Functions behind them hold. Tensors of no dimension do not count."""

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and tensor.dim():
                self.saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        def note_held(output: Tensor) -> None:
            for tensor in held(output.grad_fn):
                note(tensor)

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield note_held

    def backward(self, output: Tensor, comm: Communicator) -> None:
        """Run the backward behind an output."""
        if output.requires_grad:
            with self.counted(comm, 1):
                output.backward(torch.ones_like(output))


class Cut:
    """The run of an end whose rows are cut apart: each has its own graph."""

    def __init__(self, ends: Ends, end: str) -> None:
        self.comm, self.given = ends.comm, ends.given()
        self.rows = ends.descriptions()[end]
        self.runs: dict[str, Run] = {}
        self._outputs: list[tuple[Run, Tensor]] = []
        self._writers: dict[int, str] = {}
        with ExitStack() as patches:
            for row in self.rows:
                for owner, name in callables(row, ends.module(end)):
                    call = partial(self._call, row, getattr(owner, name))
                    patches.enter_context(mock.patch.object(owner, name, call_of(call)))
            self.result = ends.run(end)
        for run, output in self._outputs:
            run.backward(output, self.comm)

    def _call(self, row: Operator, compute: Callable[..., Tensor], *args: Any, **named: Any):
        """Compute a row, or a part of it, from inputs that have no graph."""
        run = self.runs.setdefault(row.name, Run())
        cut = [apart(one) if isinstance(one, Tensor) else one for one in args]
        inputs = {one.untyped_storage().data_ptr() for one in cut if isinstance(one, Tensor)}
        with run.counted(self.comm, 0), run.keeping(self.given) as note:
            output = compute(*cut, **named)
        note(output)
        if getattr(row, "shares_input", False):  # it is in the account of the row that wrote it
            for storage in inputs & run.saved.keys():
                self.runs[self._writers[storage]].saved[storage] = run.saved.pop(storage)
        self._writers[output.untyped_storage().data_ptr()] = row.name
        self._outputs.append((run, output))
        return apart(output)


def apart(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, which still has a gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def call_of(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function, which a class binds as a method."""
    return lambda *args, **named: call(*args, **named)


def callables(row: Operator, module: nn.Module) -> list[tuple[Any, str]]:
    """Return (owner, name) of what computes a row: a function, or the methods of its module."""
    match row:
        case SelectPositions():
            return [(heads, "select_positions")]
        case Activate():
            return [(transformer, "gelu")]
        case Tanh():
            return [(Tensor, "tanh"), (HiddenDropout, "forward")]
        case CrossEntropy():
            return [(heads, "cross_entropy") if row.split else (F, "cross_entropy")]
    own = module.get_submodule(row.name)
    return [(own, name) for name in vars(type(own)) if not name.startswith("_")]


def account(row: Operator, sizes: Sizes, input_trains: bool) -> Run:
    """Return what a row's account says."""
    run = Run()
    back = [*(row.backward(sizes) if input_trains else ()), *row.weights(sizes)]
    kernels = (list(row.forward(sizes)), back)
    run.flops = [int(sum(kernel.flops for kernel in some)) for some in kernels]
    run.messages = (
        foreseen_messages(row, sizes, "forward"),
        foreseen_messages(row, sizes, "backward", input_trains),
    )
    if input_trains or row.trains:
        run.saved = {0: total_bytes(row.kept(sizes, "none"))}
    return run


def differences(name: str, found: Run, said: Run) -> Iterator[str]:
    """Yield in which respects a run is not what its account says."""
    for what, real, foreseen in (
        ("keeps", sum(found.saved.values()), sum(said.saved.values())),
        ("FLOPs", found.flops, said.flops),
        ("sends", found.messages, said.messages),
    ):
        if real != foreseen:
            yield f"{name} {what}: {real}, not {foreseen}"


def wrong_rows(ends: Ends) -> Iterator[str]:
    """Yield the rows whose account is not what was measured, and in which respect."""
    for end, rows in ends.descriptions().items():
        runs = Cut(ends, end).runs
        input_trains = ends.input_trains(end)
        for row in rows:
            if row.name not in runs:
                yield f"{end}: {row.name} did not run"
                continue
            yield from differences(row.name, runs[row.name], account(row, ends.sizes, input_trains))
            input_trains = input_trains or row.trains


def wrong_ends(ends: Ends) -> Iterator[str]:
    """Yield the ends whose sums are not what was measured in an uncut run."""
    sizes, comm = ends.sizes, ends.comm
    memory = StageMemory(sizes.model, VOCAB_SIZE, sizes.precision, sizes.software)
    for end, rows in ends.descriptions().items():
        found, said, trains = Run(), Run(), ends.input_trains(end)
        with found.counted(comm, 0), found.keeping(ends.given()) as note:
            output = ends.run(end)
        note(output)
        found.backward(output, comm)
        said.saved = {0: getattr(memory.parts(sizes.layout), end)}
        back = [*backward_kernels(rows, sizes, trains), *weight_kernels(rows, sizes)]
        passes = (forward_kernels(rows, sizes), back)
        said.flops = [int(sum(kernel.flops for kernel in some)) for some in passes]
        for phase, sent in zip(("forward", "backward"), said.messages, strict=True):
            for message in messages(rows, sizes, phase, trains):
                sent[message.collective] += message.whole_bytes
        yield from differences(end, found, said)


def wrong(name: str, axis: TensorAxis, precision: str = "fp64", **how: Any) -> list[str]:
    """Return the mistakes in the accounts of both ends, and of their rows. `how` is passed to
    `ends_of`."""
    ends = ends_of(name, axis, precision, **how)
    return [*wrong_rows(ends), *wrong_ends(ends)]


def wrong_parameters(ends: Ends) -> list[object]:
    """Return the parameters (name, elements on this rank, True if trained) that either the account
    or the model has alone."""
    model, tensor = ends.sizes.model, ends.sizes.layout.tensor
    said = []
    for end, rows in ends.descriptions().items():
        prefix = "embedding." if end == "embedding" else ""
        for name, part in parts_of(rows).items():
            for leaf, count in zip(("weight", "bias"), part.weights(tensor), strict=False):
                said.append((f"{prefix}{name}.{leaf}", count, part.trains))
    renamed = {"head.weight": TIED_NAME} if model.tie_embeddings else {}
    said = [(renamed.get(name, name), *rest) for name, *rest in said]
    found = [
        (name, weight.numel(), weight.declaration.trains)
        for name, weight in ends.stage.named_logical_parameters()
        if not name.startswith("layers.")
    ]
    either = Counter(found)
    either.subtract(Counter(said))
    return [one for one, count in either.items() if count]
