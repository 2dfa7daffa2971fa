"""The description of the modules for multi-token prediction (DeepSeek-AI 2024, V3: arXiv
2412.19437, section 2.2), and of everything after the last layer of a model.

Module k (from 0) predicts, at position i, the token i + 2 + k. Each module combines two inputs: the
embedding of the token i + 1 + k, and an activation. Module 0 reads the activation of the last
layer; any other module reads the activation of the module before it:

    next -> look-up -> norm
    x -> norm, next -> concatenation -> linear layer -> layer -> norm -> output head -> loss

All modules use the table of the embedding and the output head of the model.
"""

from dataclasses import replace

from ptdmpi.config import ModelConfig
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.ahead.operators import Concatenate, LookUpAgain, PredictAgain
from ptdmpi.plan.layer.describe import WORD_TABLE, LayerBuild
from ptdmpi.plan.layer.ends import CrossEntropy, Predict
from ptdmpi.plan.layer.folds import operators
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Linear, Table

MODULES = "mtp"  # the names of the modules' parameters begin with this text
TABLE = f"{MODULES}.{WORD_TABLE}"  # the copy of the embedding's table, unless the head is tied


def plain(model: ModelConfig) -> ModelConfig:
    """Return the configuration from which modules are made: the linear layers of a module are
    neither quantized nor computed in 8-bit floating point."""
    return model.adapted(model.adapt)


def inner(model: ModelConfig) -> tuple[Operator, ...]:
    """Return the operators of one module between look-up and output head. The operators read the
    activation "x" and the embedding "next", and write "x". They include the operators
    of one transformer layer, which is of the same kind as the model's last layer."""
    model = plain(model)
    kind = model.kind_of(model.layers - 1)
    build = LayerBuild(model, adapted=False, mixes=kind.mixes)
    linear = Linear(
        inputs=2 * model.hidden,
        outputs=(model.hidden,),
        bias=False,
        init_std=model.matrix_std,
        shared_gradient=True,
    )
    joined = ("y",)
    return (
        replace(build.norm("token_norm", "next", "next"), joins=False),
        build.norm("hidden_norm", "x", "y"),
        Concatenate("joined", ("next", "y"), joined),
        replace(build.product("projection", linear, "y", "x"), rows="local"),
        *operators(describe.layer_of(model, kind)),
        replace(build.norm("norm", "x", "x"), joins=False),
    )


def module(model: ModelConfig, vocab_size: int, number: int) -> tuple[Operator, ...]:
    """Return the operators of module `number`, from the ids of the next tokens to the loss."""
    table = Table(vocab_size, model.hidden, model.init_std, split=True)
    linear = Linear(
        inputs=model.hidden,
        outputs=(vocab_size,),
        bias=False,
        init_std=model.init_std,
        split="columns",
    )
    predict = PredictAgain(
        name="head",
        inputs=("x",),
        outputs=("logits",),
        linear=linear,
        shares_input=_is_read_again(model, number),
    )
    return (
        LookUpAgain(WORD_TABLE, ("ids",), ("next",), table),
        *inner(model),
        predict,
        CrossEntropy("loss", ("logits",), ("loss",), vocab_size),
    )


def _is_read_again(model: ModelConfig, number: int) -> bool:
    """Return True if the next module keeps the activation that the output head after module
    `number` reads, so that the head need not keep it. If `number` is -1, the output head is the
    head of the model itself. With muP, the result is False: the head multiplies its input by a
    factor and keeps the product, which no module reads."""
    return number + 1 < model.mtp_modules and model.width_ratio == 1.0


def head(model: ModelConfig, vocab_size: int) -> tuple[Operator, ...]:
    """Return all operators after the last layer of a model: those of `describe.head`, and those of
    the modules."""
    rows = describe.head(model, vocab_size)
    if not model.mtp_modules:
        return rows
    kept = _is_read_again(model, -1)
    rows = tuple(
        replace(row, shares_input=kept) if isinstance(row, Predict) else row for row in rows
    )
    for number in range(model.mtp_modules):
        rows += module(model, vocab_size, number)
    return rows
