"""The self-check of a conversion: both sides give the same logits on fixed prompts, at every head.

One side are the written files, read by `reference.py`; the other is the model that is trained, from
the checkpoint, layer by layer. Both compute in float64 on a CPU, so what remains is far below the
bar, and any mistake far above it. In memory is one layer, or the embedding, at a time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ptdmpi.checkpoint.boxes import Reader
from ptdmpi.config import Config
from ptdmpi.convert.family import ConfigJson, Counterpart, Family
from ptdmpi.convert.packed import UnpackedFiles
from ptdmpi.convert.plan import Plan
from ptdmpi.convert.reference import FORWARD, Question
from ptdmpi.convert.tensors import TYPES, WeightFiles
from ptdmpi.inference.stored import StoredModel, loaded_layer
from ptdmpi.model.batch import Batch
from ptdmpi.model.stage import Stage

# Greatest difference of two logits over the greatest magnitude of all.
BAR = 1e-5
PROMPTS, PROMPT_TOKENS = 3, 32


class CheckFailed(Exception):
    """The two sides differ: what was written is not the model that was read."""


def prompts(vocab_size: int, seq_length: int) -> Tensor:
    """Fixed ids [b, s] that come from all of the vocabulary."""
    length = min(PROMPT_TOKENS, seq_length)
    numbers = torch.arange(PROMPTS * length).view(PROMPTS, length)
    return (numbers * 7919 + numbers**2 * 31) % vocab_size


def segments(ids: Tensor, token_types: int) -> Tensor:
    """Types [b, s] of the tokens: as many segments of like length as there are types."""
    length = ids.shape[1]
    return (torch.arange(length) * token_types // length).expand_as(ids)


def compare(
    stored: StoredModel,
    family: Family,
    config: ConfigJson,
    files: WeightFiles | UnpackedFiles,
    plan: Plan,
) -> float:
    """The greatest relative difference of the logits of any head. Raises CheckFailed above BAR.

    Our weights are first rounded to the types that the files have.
    """
    model = stored.config().model
    ids = prompts(stored.vocab_size, model.seq_length)
    types = segments(ids, model.token_types) if model.token_types else None
    names = {counterpart.theirs: name for name, counterpart in plan.by_name.items()}
    names |= {head: names[word] for head, word in family.again.items() if word in names}
    names |= {family.base(name): name for name in plan.by_name}

    def get(name: str) -> Tensor:
        return files.read(names[name]).double()

    with torch.no_grad():
        asked = Question(ids, types, model.sentence_order, model.classifies)
        theirs = FORWARD[family.model_type](config.values, get, asked)
        dtypes = [(found, files.tensors[name].dtype) for name, found in plan.by_name.items()]
        ours = _logits(stored, asked, dtypes)
    if not all(one.isfinite().all() for one in theirs):
        raise CheckFailed(
            "the model's logits are not finite: a weight is inf or NaN; nothing was written"
        )
    found = [_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    difference = next((one for one in found if not one <= BAR), max(found))  # perhaps no number
    if not difference <= BAR:
        raise CheckFailed(
            f"the self-check failed: logits differ by {difference:.1e} of their magnitude, at most "
            f"{BAR:.0e} is allowed; nothing was written"
        )
    return difference


def _difference(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float((ours - theirs).abs().max() / scale)


def _logits(
    stored: StoredModel, asked: Question, dtypes: Iterable[tuple[Counterpart, str]]
) -> tuple[Tensor, ...]:
    config, ids = stored.config(precision="fp64"), asked.ids
    if config.model.positions == "rope":  # whose table is as long as the prompts
        config = config.replace("model", seq_length=ids.shape[1])
    by_parameter: dict[str, list[tuple[Counterpart, str]]] = {}
    for counterpart, dtype in dtypes:
        by_parameter.setdefault(counterpart.ours, []).append((counterpart, dtype))
    nothing = torch.zeros(ids.shape[0], dtype=torch.int64)
    types = None if asked.types is None else asked.types.t()
    # where a head for a task looks: at the first token, or at the last
    at = torch.full((1, len(ids)), 0 if config.model.masked else ids.shape[1] - 1)
    labels = ids.t()[:1] if asked.classifies else ids.t()
    batch = Batch(ids.t(), labels, None, nothing, None, at, types=types)
    x: Tensor | None = None
    found: tuple[Tensor, ...] = ()
    with stored.reader() as reader:
        for layer in range(config.model.layers):
            stage = _stage(config, stored.vocab_size, layer, reader, by_parameter)
            x = stage.hidden(batch, x, None)
            if stage.last and asked.classifies:
                return (stage.scores(batch, x, None),)
            if stage.last:
                found = stage.heads(x)
    tokens, *orders = found
    return tokens.transpose(0, 1), *orders


def _stage(
    config: Config,
    vocab_size: int,
    layer: int,
    reader: Reader,
    types: dict[str, list[tuple[Counterpart, str]]],
) -> Stage:
    """One layer of our model with its weights, and what stands before the first or after the
    last."""
    stage, buffer = loaded_layer(config, vocab_size, layer, reader)
    for name, entry in buffer.entries.items():
        whole = entry.view(buffer.weights)
        for counterpart, dtype in types.get(name, []):
            whole[counterpart.box.index] = whole[counterpart.box.index].to(TYPES[dtype]).double()
    return stage
