"""The tokenizer of a model that was trained here, as `transformers` finds it beside a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, TEMPLATE, find_template
from ptdmpi.data.header import ShardHeader
from ptdmpi.data.shards import Dataset
from ptdmpi.data.words import BYTES, SPECIAL_NAMES, read_vocabulary, tokens_of
from ptdmpi.inference.stored import StoredModel
from ptdmpi.inference.tokenizer import TOKENIZER, find_tokenizer, shard_header, template_file

# What transformers calls the special tokens of a masked language model.
ROLES = {"begin": "cls_token", "separator": "sep_token", "mask": "mask_token"}
END = "<|endoftext|>"  # the name of an end that is no token of the tokenizer
# Special tokens: their names in transformers -> id, and what they may be called.
Names = dict[str, tuple[int, tuple[str, ...]]]


@dataclass(frozen=True)
class Beside:
    """`eod_id`: what ends a text, of a model that continues one; `files`: name -> content; `note`:
    what is missing."""

    eod_id: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""


def tokenizer_of(stored: StoredModel) -> Beside:
    """The tokenizer of the shards that the model was trained on; none where they are gone."""
    without = f"no {TOKENIZER} is written"
    try:
        header = shard_header(stored)
    except InputError as error:
        return Beside(note=f"{without}: {error}")
    if header is None:
        return Beside(note=f"{without}: {stored.path} does not say on what it was trained")
    masked = stored.config().model.masked
    eod_id = None if masked else header.eod_id
    if header.tokenizer == BYTES:
        what = "ids 0 to 255 are bytes, 256 ends a document"
        return Beside(eod_id, note=f"{without}: its tokens are single bytes; {what}")
    if not header.tokenizer.endswith(".json"):
        return Beside(eod_id, note=f"{without}: its tokenizer is {header.tokenizer}")
    try:
        content = find_tokenizer(header, stored).read_bytes()
        names = _special(header) if masked else {}
    except InputError as error:
        return Beside(eod_id, note=f"{without}: {error}")
    if not masked:
        names = dict.fromkeys(("bos_token", "eos_token"), (header.eod_id, (END,)))
    return _beside(eod_id, content, names, stored.config().model.seq_length)


def template_of(stored: StoredModel, kept: Path | None) -> tuple[dict[str, bytes], str]:
    """The chat template of the conversations that the model was trained on here, as a file that
    transformers prefers to what `kept` has, where that is another one; and what is to be known of
    it."""
    try:
        file = template_file(stored)
    except InputError as error:  # the shards are gone, which is told where the tokenizer lacks, too
        return {}, "" if kept is None else f"no {TEMPLATE} of its own is written: {error}"
    if file is None:
        return {}, ""
    own, before = find_template(None, file, "").source, ""
    if kept is not None and (found := find_template(kept / TOKENIZER, None, "").source) != PLAIN:
        before = found
    if own == before:
        return {}, ""
    instead = ", in place of another that came with the model" if before else ""
    return {TEMPLATE: own.encode()}, f"{TEMPLATE} is that of its conversations{instead}"


def _beside(eod_id: int | None, content: bytes, names: Names, seq_length: int) -> Beside:
    """With a tokenizer.json as it is, and a tokenizer_config.json that names special tokens, which
    are added where the tokenizer lacks them."""
    known = {number: token for token, number in tokens_of(json.loads(content))}
    missing = {number: called[0] for number, called in names.values() if number not in known}
    note = ""
    if missing and sorted([*known, *missing]) != list(range(len(known) + len(missing))):
        # transformers gives a new token the next id, whatever tokenizer_config.json says
        told = " and ".join(f"{token} has id {number}" for number, token in missing.items())
        note = f"{told} here, and no name in tokenizer_config.json"
        names = {role: one for role, one in names.items() if one[0] in known}
        missing = {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **{role: known.get(number, called[0]) for role, (number, called) in names.items()},
        "added_tokens_decoder": {
            str(number): {"content": token, "special": True} for number, token in missing.items()
        },
    }
    text = json.dumps(config, indent=2) + "\n"
    return Beside(eod_id, {TOKENIZER: content, "tokenizer_config.json": text.encode()}, note)


def _special(header: ShardHeader) -> Names:
    vocabulary = read_vocabulary(Dataset(Path(header.path).parent), whole_words=False)
    return {name: (getattr(vocabulary, role), SPECIAL_NAMES[role]) for role, name in ROLES.items()}
