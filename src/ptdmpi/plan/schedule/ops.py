"""The table of the kinds of ops. An op is a computation on one microbatch in one pipeline stage,
such as a forward. A row of the table has all properties of one kind of op.

All code that depends on the kind of an op reads the table `OP_KINDS`. This code handles the text of
ops, their dependencies, the method that the runner calls, spans, drawings, simulated costs, and the
memory that a rank holds. A new kind of op needs three things: a row in this table, the method of
`ptdmpi.model.stage.Stage` that the row names, and a schedule that uses the kind.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
# letters of the two parts into which a backward may be split: I (gradient of the input) and W
# (gradients of the weights)
INPUT, WEIGHT = "I", "W"
ACTIVATIONS = "activations"
# name of the tensors that I keeps, so that W can compute the gradients of the weights later
OPERANDS = "operands"
_OP_TEXT = re.compile(r"([A-Z])(\d+)\.(\d+)", re.ASCII)


@dataclass(frozen=True)
class Ink:
    """The colour in which the ops of a kind are drawn: its name, and a shade for each chunk of a
    rank.

    `shades` are for pictures, and `ansi` are backgrounds among the 256 colours of a terminal.
    `shades` and `ansi` are both in the order of the chunks.
    """

    name: str
    shades: tuple[str, str, str, str]
    ansi: tuple[int, int, int, int]


@dataclass(frozen=True)
class OpKind:
    """A row of the table of ops: the properties of one kind of op.

    `letter` is the first letter of the text of such an op (F in "F2.0"), and `span` is the kind of
    its spans in a timeline. `method` is the method of Stage that computes the op: (microbatch,
    input or None) -> output or None.

    Dependencies: the input of an op is the output of the op of the same kind, on the same
    microbatch, in a neighbouring stage. `neighbour` is the offset of this stage: -1 is the previous
    stage, +1 is the next stage, and 0 means that no other stage produces an input. `after` names
    the kinds of ops that must have ended before this op, for the same stage and microbatch, if the
    schedule has such ops.

    Memory: an inventory is a set of tensors that a stage keeps for one microbatch. The stage keeps
    the inventory `keeps` from the start of the op, and frees the inventory `frees` at the end of
    the op. `works` is the name of the additional working memory that the op needs. If a kind has
    both `keeps` and `frees`, its op replaces the freed inventory with the kept one, and both
    inventories count as part of its working memory. `gradients` is True if the op adds to the
    gradients of its stage's weights.

    Time: `cost` is the name of an attribute of `simulate.Costs`, such as "forward_s". The simulated
    time of the op is this attribute times `share`. Drawings use `mark` and `ink`.
    """

    letter: str
    span: str
    method: str
    cost: str
    mark: str
    ink: Ink
    share: float = 1.0
    neighbour: int = 0
    after: tuple[str, ...] = ()
    keeps: str = ""
    frees: str = ""
    works: str = ""
    gradients: bool = False


OP_KINDS: dict[str, OpKind] = {
    FORWARD: OpKind(
        letter=FORWARD,
        span="forward",
        method="forward_microbatch",
        cost="forward_s",
        mark=">",
        ink=Ink("blue", ("#2b5c9e", "#4f86c6", "#86b0de", "#b5d0ee"), (25, 32, 75, 153)),
        neighbour=-1,
        keeps=ACTIVATIONS,
    ),
    BACKWARD: OpKind(
        letter=BACKWARD,
        span="backward",
        method="backward_microbatch",
        cost="backward_s",
        mark="<",
        ink=Ink("green", ("#2e7d4f", "#57a773", "#8fc9a3", "#bfe3cb"), (28, 35, 78, 157)),
        neighbour=+1,
        after=(FORWARD,),
        frees=ACTIVATIONS,
        works="backward",
        gradients=True,
    ),
    INPUT: OpKind(
        letter=INPUT,
        span="inputs",
        method="input_microbatch",
        cost="input_s",
        mark="<",
        # like a whole backward, I sends the gradient of its input to the previous stage, so it has
        # the colour of a backward
        ink=Ink("green", ("#2e7d4f", "#57a773", "#8fc9a3", "#bfe3cb"), (28, 35, 78, 157)),
        neighbour=+1,
        after=(FORWARD,),
        keeps=OPERANDS,
        frees=ACTIVATIONS,
        works="inputs",
    ),
    WEIGHT: OpKind(
        letter=WEIGHT,
        span="weights",
        method="weight_microbatch",
        cost="weight_s",
        mark="-",
        ink=Ink("orange", ("#9a5b13", "#c98324", "#e0ac66", "#f1d4ab"), (130, 172, 179, 223)),
        after=(INPUT,),
        frees=OPERANDS,
        works="weights",
        gradients=True,
    ),
}


def kind_of_span(span: str) -> OpKind | None:
    """Return the kind of op whose spans in a timeline have the kind `span`, for example "forward".
    Return None if such spans are not ops (for example, messages)."""
    return next((kind for kind in OP_KINDS.values() if kind.span == span), None)


class Op(NamedTuple):
    """A computation on one microbatch in one stage; `kind` is a key of the table `OP_KINDS`."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def row(self) -> OpKind:
        """Return the properties of the op's kind: its row of the table `OP_KINDS`."""
        return OP_KINDS[self.kind]

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Return the op whose text is `text`, for example "F2.0". Raise ValueError if `text` is not
        the text of an op."""
        match = _OP_TEXT.fullmatch(text)
        if match is None or match[1] not in OP_KINDS:
            raise ValueError(f'"{text}" is not an op: F2.0 is the forward of stage 2, microbatch 0')
        return cls(match[1], int(match[2]), int(match[3]))
