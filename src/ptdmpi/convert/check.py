"""The self-check of a conversion: the original and the converted model must give the same logits on
fixed prompts.

The forward passes in `reference.py` use the weights in the Hugging Face files, and ptdmpi's model
uses the weights in the checkpoint. The logits of every head are compared. ptdmpi and the reference
both compute in float64 on a CPU. Rounding errors of the logits are therefore far below the limit
BAR, and a mistake in the conversion changes the logits by far more than BAR. At any time only one
layer, or the embedding, is in memory.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.config import ModelConfig
from ptdmpi.convert.family import ConfigJson, Counterpart, Family, copies_of
from ptdmpi.convert.packed import UnpackedFiles
from ptdmpi.convert.plan import Plan
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.tensors import TYPES, WeightFiles
from ptdmpi.inference.folded import fold
from ptdmpi.inference.stored import StoredModel, loaded_layer
from ptdmpi.model.batch import Microbatch
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.plan.layer.ahead.modules import MODULES

# The largest allowed difference between two logits of a head, relative to the greatest magnitude of
# the logits of this head.
BAR = 1e-5
PROMPTS = 3
PROMPT_TOKENS = 32


class CheckFailed(Exception):
    """The error for a conversion that changes the logits of a model."""


def prompts(vocab_size: int, seq_length: int) -> Tensor:
    """Return fixed token ids [prompts, tokens] that are spread over the vocabulary."""
    length = min(PROMPT_TOKENS, seq_length)
    numbers = torch.arange(PROMPTS * length).view(PROMPTS, length)
    return (numbers * 7919 + numbers**2 * 31) % vocab_size


def segments(ids: Tensor, token_types: int) -> Tensor:
    """Return the token types (indices of segments) [prompts, tokens] for the token ids. The first
    tokens have type 0, the next tokens type 1, and so on. Each type has about equally many
    tokens."""
    length = ids.shape[1]
    return (torch.arange(length) * token_types // length).expand_as(ids)


def compare(
    stored: StoredModel,
    family: Family,
    config: ConfigJson,
    *,
    files: WeightFiles | UnpackedFiles,
    plan: Plan,
) -> float:
    """Compare the logits of each output head of the checkpoint `stored` with those of the Hugging
    Face model in `files`. Return the greatest difference of any head, relative to the greatest
    magnitude of this head's logits. Raise CheckFailed if the difference is above BAR, or if logits
    are not finite.

    The weights of ptdmpi's model are first rounded to the types of the tensors in `files`.
    """
    model = stored.config().model
    ids = prompts(stored.vocab_size, model.seq_length)
    types = segments(ids, model.token_types) if model.token_types else None
    names = {counterpart.theirs: name for name, counterpart in plan.by_name.items()}
    again = {**family.again, **copies_of(family, model)}
    names |= {head: names[word] for head, word in again.items() if word in names}
    names |= {family.base(name): name for name in plan.by_name}

    def get(name: str) -> Tensor:
        """Return the tensor `name` of the Hugging Face files."""
        return files.read(names[name]).double()

    with torch.no_grad():
        ahead = _modules(tensor.ours for tensor in plan.by_name.values())
        question = Question(ids, types, model.sentence_order, model.classifies, ahead=ahead)
        theirs = FORWARD[family.model_type](config.values, get, question)
        dtypes = [(tensor, files.tensors[name].dtype) for name, tensor in plan.by_name.items()]
        ours = _logits(stored, question, dtypes)
    if not all(logits.isfinite().all() for logits in theirs):
        raise CheckFailed(
            "the model's logits are not finite: a weight is inf or NaN; nothing was written"
        )
    differences = [_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    # in contrast to `>`, `not <=` is also True for NaN
    difference = next((value for value in differences if not value <= BAR), max(differences))
    if not difference <= BAR:
        raise CheckFailed(
            f"the self-check failed: logits differ by {difference:.1e} of their magnitude, at most "
            f"{BAR:.0e} is allowed; nothing was written"
        )
    return difference


def _modules(names: Iterable[str]) -> int:
    """Return the number of modules for multi-token prediction to which these parameters of ptdmpi
    belong."""
    split = (name.split(".") for name in names)
    return len({parts[1] for parts in split if parts[0] == MODULES})


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the greatest absolute difference of the elements of two tensors, divided by the
    greatest magnitude in `theirs`."""
    scale = theirs.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float((ours - theirs).abs().max() / scale)


def _logits(
    stored: StoredModel, question: Question, dtypes: Iterable[tuple[Counterpart, str]]
) -> tuple[Tensor, ...]:
    """Round each weight of ptdmpi's model to its data type in `dtypes`. Return the logits of each
    head of the rounded model for the prompts in `question`."""
    config = stored.config(precision="fp64")
    ids = question.ids
    # shorten the sequence length, so that the table of rotary angles is only as long as the prompts
    if config.model.positions == "rope":
        config = config.replace("model", seq_length=ids.shape[1])
    by_parameter: dict[str, list[tuple[Counterpart, str]]] = {}
    for counterpart, dtype in dtypes:
        by_parameter.setdefault(counterpart.ours, []).append((counterpart, dtype))
    nothing = torch.zeros(ids.shape[0], dtype=torch.int64)
    types = None if question.types is None else question.types.t()
    # the position of the token that a head for a task reads: the first or the last token
    at = torch.full((1, len(ids)), 0 if config.model.masked else ids.shape[1] - 1)
    # the last token of a prompt has no next token, so its label is the id 0, as in `reference.py`
    labels = ids.t()[:1] if question.classifies else F.pad(ids[:, 1:], (0, 1)).t()
    batch = Microbatch(
        inputs=ids.t(),
        labels=labels,
        weights=None,
        samples=nothing,
        documents=None,
        masked=at,
        types=types,
    ).with_ahead(question.ahead)
    x: Tensor | None = None
    heads: tuple[Tensor, ...] = ()
    with stored.reader() as reader:
        for layer in range(config.model.layers):
            # the first stage contains the embedding, and the last stage contains the heads
            stage, buffer = loaded_layer(config, stored.vocab_size, layer, reader)
            _round(buffer, by_parameter, config.model)
            x = stage.hidden(batch, x, None)
            if stage.last and question.classifies:
                return (stage.scores(batch, x, None),)
            if stage.last:
                heads = (*stage.heads(x), *stage.heads_ahead(batch, x))
    # the logits of tokens are [tokens, prompts, vocabulary], so swap two dims; a head for the order
    # of segments has logits [prompts, 2]
    return tuple(x.transpose(0, 1) if x.dim() == 3 else x for x in heads)


def _round(
    buffer: ParameterBuffer, types: dict[str, list[tuple[Counterpart, str]]], model: ModelConfig
) -> None:
    """Round the parameters in `buffer` as the tensors in the Hugging Face files are rounded.
    `types` has, for each parameter, the tensors that contain its slices, and the data types of
    these tensors. The values in the files include muP's factors, so each slice is multiplied by its
    factor, rounded, and divided by the factor again."""
    for name, entry in buffer.entries.items():
        whole = entry.view(buffer.weights)
        for counterpart, dtype in types.get(name, []):
            box = counterpart.box
            rounded = fold(model, name, box, whole[box.index]).to(TYPES[dtype]).double()
            whole[box.index] = fold(model, name, box, rounded, inverse=True)
