"""Op kinds as a table: all that the house knows of a kind of computation stands in its row.

The ops' text, what an op waits for, the runner's call, spans, drawings, simulated costs and the
memory that a rank holds all read `OP_KINDS`; nothing else tells one kind from another. A new kind
is a row here, the method of `ptdmpi.model.stage.Stage` that it names, and a schedule that uses it.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
INPUT, WEIGHT = "I", "W"  # the two parts of a backward that is split
ACTIVATIONS = "activations"
OPERANDS = "operands"  # of the weights' gradients that are put off
_OP_TEXT = re.compile(r"([A-Z])(\d+)\.(\d+)", re.ASCII)


@dataclass(frozen=True)
class Ink:
    """How the ops of a kind are drawn: a colour's name, and its shades for the chunks of a rank,
    first to last, for pictures and as backgrounds among the 256 colours of a terminal."""

    name: str
    shades: tuple[str, str, str, str]
    ansi: tuple[int, int, int, int]


@dataclass(frozen=True)
class OpKind:
    """One row of the table.

    `letter` begins the text of such an op, `span` is the kind of its spans in a timeline, `method`
    the method of Stage that computes it: (microbatch, input or None) -> output or None.

    What it needs: `neighbour`, the place of the stage whose op of the same kind and microbatch
    hands its output over, counted from its own (-1: the stage before; 0: no input travels); and
    `after`, the kinds of ops of its own stage and microbatch that must have ended, as far as the
    schedule has such ops.

    What it holds: from its start on its stage keeps the inventory `keeps` of its microbatch, and
    at its end the inventory `frees` is let go. `works` names the working memory that it needs
    beside. Where it both keeps and frees, one comes as the other goes, and both are part of that.
    `gradients`: it adds to the gradients of its stage's weights.

    What it takes: the field `cost` of the costs that are simulated, times `share`. `mark` and `ink`
    draw it.
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
        # as a whole backward, in whose place it stands on the way back through the stages
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
    """The row whose ops leave spans of kind `span`; None if no op does (a message, say)."""
    return next((kind for kind in OP_KINDS.values() if kind.span == span), None)


class Op(NamedTuple):
    """One computation: an op of `kind`, a letter of the table, on one microbatch in one stage."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def row(self) -> OpKind:
        """The row of its kind."""
        return OP_KINDS[self.kind]

    @classmethod
    def parse(cls, text: str) -> "Op":
        """The op that prints as `text`, such as "F2.0"; raises ValueError for other text."""
        match = _OP_TEXT.fullmatch(text)
        if match is None or match[1] not in OP_KINDS:
            raise ValueError(f'"{text}" is no op: F2.0 is the forward of stage 2, microbatch 0')
        return cls(match[1], int(match[2]), int(match[3]))
