"""What a row of a model does in a run, and what its account says: FLOPs, messages, products.

Each table of models holds shapes whose rows differ.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.kernels import Kernels, host
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.plan.layer.account import FusedAttention, MatrixProduct
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.machine.cluster import TRAINER, Software
from tests._layers import DTYPES

EXPERTS = {"model.kind": "llama", "model.expert_hidden": 24}
SHAPES = {
    "gpt": {},
    "llama": {"model.kind": "llama", "model.ffn_hidden": 48, "model.kv_heads": 4},
    "qwen3": {"model.kind": "qwen3", "model.kv_heads": 4, "model.head_size": 6},
    "norms of all heads": {
        "model.kind": "llama",
        "model.kv_heads": 4,
        "model.head_size": 6,
        "model.qk_norm": "all",
    },
    "qwen2": {"model.kind": "qwen2", "model.kv_heads": 4},
    "gemma2": {"model.kind": "gemma2", "model.kv_heads": 4, "model.sliding_window": 4},
    "bert": {"model.kind": "bert"},
    "dropout": {"model.dropout": 0.1},
    "attention dropout": {"model.dropout": 0.1, "model.attention_dropout": 0.1},
    "experts": {**EXPERTS, "model.experts": 4, "model.experts_per_token": 2},
    "shared experts": {
        **EXPERTS,
        "model.experts": 2,
        "model.experts_per_token": 1,
        "model.router_normalize": False,
        "model.shared_experts": 1,
    },
}
# a rotary key of as many numbers as a kernel must have to be counted
SHAPES["latent"] = LATENT = {
    "model.kind": "deepseek",
    "model.head_size": 32,
    "model.rope_head_size": 24,
    "model.value_head_size": 8,
    "model.q_lora_rank": 24,
    "model.kv_lora_rank": 16,
}
LORA = {"adapt.method": "lora", "adapt.rank": 2}
ADAPTED = {  # frozen layers next to what trains
    "lora": {"model.kind": "llama", **LORA},
    "ia3": {"model.kind": "llama", "adapt.method": "ia3"},
    "lora of experts": {**EXPERTS, "model.experts": 4, "model.experts_per_token": 2, **LORA},
    "lora beside experts": {
        **EXPERTS,
        "model.experts": 4,
        "model.experts_per_token": 2,
        **LORA,
        "adapt.targets": ["attention.*"],
    },
}
WIDENED = HostChoice(half="widened")
HALF = ("bf16", "fp16", "fp8")


def precisions_of(name: str) -> list[str]:
    """Return the precisions in which a model of `SHAPES` or `ADAPTED` computes; fp8 refuses experts
    and adapters."""
    changes = {**SHAPES, **ADAPTED}[name]
    refuses = changes.get("model.experts", 0) > 0 or name in ADAPTED
    return [precision for precision in DTYPES if not (precision == "fp8" and refuses)]


def require_legal(name: str, tensor: int) -> None:
    """Skip a test of a model of `SHAPES` that cannot be divided over `tensor` tensor ranks."""
    if tensor > 1 and SHAPES.get(name, {}).get("model.qk_norm") == "all":
        pytest.skip("a norm over all heads is on one tensor rank")


def chosen_kernels(precision: str, widens: bool) -> Kernels:
    """Return the kernels of a precision; `widens`: products of half types are in float32."""
    return Kernels(WIDENED if widens else None, PRECISIONS[precision])


def program(kernels: Kernels, precision: str) -> Software:
    """Return this trainer as the planner knows it, with these kernels."""
    update = {
        "wide_products": kernels.widens("cpu", DTYPES[precision]),
        **kernels.chosen("cpu", DTYPES[precision]).attention.blocks,
        "gradient_bytes": PRECISIONS[precision].master.bytes,
    }
    return TRAINER.model_copy(update=update)


def _linear_flops(x: object, weight: object, *rest: object, **named: object) -> int:
    """FLOPs of oneDNN's fused linear."""
    *rows, inner = getattr(x, "shape", x)
    columns, _ = getattr(weight, "shape", weight)
    return 2 * math.prod(rows) * inner * columns


def _added_flops(total: Tensor, left: Tensor, right: Tensor, **rest: object) -> int:
    """FLOPs of a product that is added in place; the counter passes shapes or tensors."""
    rows, inner = getattr(left, "shape", left)
    _, columns = getattr(right, "shape", right)
    return 2 * rows * inner * columns


class Products(TorchDispatchMode):
    """Counts the products of matrices that are launched."""

    NAMES = ("mm", "bmm", "addmm", "addmm_", "_linear_pointwise")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in self.NAMES
        return function(*args, **(kwargs or {}))


class Counted:
    """FLOPs and messages of what is computed inside."""

    def __init__(self, comm) -> None:
        self.comm = comm
        for dtype in host.FUSED_TYPES:  # the host tries a small product once, which must not count
            host.has_fused(dtype)
        # gradients of weights are added in place, which the counter does not know
        in_place = {
            torch.ops.aten.addmm_: _added_flops,
            torch.ops.aten.addmm.dtype_out: _added_flops,
            torch.ops.mkldnn._linear_pointwise: _linear_flops,
        }
        self.counter = FlopCounterMode(display=False, custom_mapping=in_place)

    def __enter__(self) -> "Counted":
        self.before = self.comm.tally.copy()
        self.launched = Products()
        self.counter.__enter__()
        self.launched.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.launched.__exit__(*error)
        self.counter.__exit__(*error)
        since = self.comm.tally.since(self.before)
        sent = {kind: size for kind, size in since.whole_bytes.items() if size}
        self.messages = Counter(sent)
        self.flops = self.counter.get_total_flops()
        self.products = self.launched.count


def foreseen_messages(row, sizes: Sizes, phase, input_trains: bool = True) -> Counter[str]:
    """Return the bytes of the row's messages in a phase, by collective."""
    found: Counter[str] = Counter()
    for message in row.messages(sizes, phase, input_trains):
        found[message.collective] += message.whole_bytes
    return found


def foreseen_flops(row, sizes: Sizes) -> tuple[float, float]:
    """Return the FLOPs of products; PyTorch counts none of its attention kernel on a CPU."""
    forward = [k for k in row.forward(sizes) if not isinstance(k, FusedAttention)]
    back = [*row.backward(sizes), *row.weights(sizes)]
    backward = [k for k in back if not isinstance(k, FusedAttention)]
    return sum(k.flops for k in forward), sum(k.flops for k in backward)


def foreseen_products(row, sizes: Sizes) -> tuple[int, int]:
    """Return the launches of the row's products of matrices, forward and backward."""
    back = [*row.backward(sizes), *row.weights(sizes)]
    return tuple(
        sum(kernel.launches for kernel in kernels if isinstance(kernel, MatrixProduct))
        for kernels in (row.forward(sizes), back)
    )


def has_many_scales(row, least: int) -> bool:
    """Return True if a linear in 8-bit floating point has as many scales as a tensor that counts,
    of `least` elements: a tile has few positions here, and a scale for each channel."""
    if not isinstance(row, Multiply) or row.scaling == "none":
        return False
    return max(row.linear.inputs, sum(row.linear.outputs)) >= least


def held(node: Node | None) -> Iterator[Tensor]:
    """Yield the tensors that a graph's own Functions hold as attributes."""
    nodes, seen = [node], {None}
    while nodes:
        one = nodes.pop()
        if one not in seen:
            seen.add(one)
            yield from tensors(vars(one) if hasattr(one, "__dict__") else ())
            nodes += [following for following, _ in one.next_functions]


def tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a value, its entries or its fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors(one)
    elif is_dataclass(value):
        yield from tensors(vars(value))
