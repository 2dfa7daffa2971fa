"""The tokenizer and the chat template of a model that ptdmpi has trained, as files for
`transformers`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, TEMPLATE, find_template
from ptdmpi.data.header import ShardHeader
from ptdmpi.data.shards import Dataset
from ptdmpi.data.words import BYTES, SPECIAL_NAMES, TOKENIZER, read_vocabulary, tokens_of
from ptdmpi.inference.stored import StoredModel
from ptdmpi.inference.tokenizer import find_tokenizer, shard_header, template_file

# Maps ptdmpi's names of the special tokens of a masked language model to the names in
# `transformers`.
ROLES = {"begin": "cls_token", "separator": "sep_token", "mask": "mask_token"}
# the end-of-document token, for a tokenizer that has no token with this meaning
END = "<|endoftext|>"


@dataclass(frozen=True)
class SpecialToken:
    """A special token's id, and the name to use if the tokenizer has no token with this id."""

    number: int
    name: str


# Maps keys of tokenizer_config.json to special tokens.
SpecialTokens = Mapping[str, SpecialToken]


@dataclass(frozen=True)
class ExtraFiles:
    """Files for a model's directory, as a table from name to content, and a note about files that
    are missing or replaced. `eod_id` is the end-of-document id; None for a masked language model,
    or if the id is not known."""

    eod_id: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""


def tokenizer_of(stored: StoredModel) -> ExtraFiles:
    """Return the files of the model's tokenizer, which made the shards of the training data. If the
    shards are not found, there are no files, and the note says so."""
    missing = f"no {TOKENIZER} is written"
    try:
        header = shard_header(stored)
    except InputError as error:
        return ExtraFiles(note=f"{missing}: {error}")
    if header is None:
        return ExtraFiles(note=f"{missing}: {stored.path} does not say on what it was trained")
    masked = stored.config().model.masked
    eod_id = None if masked else header.eod_id
    if header.tokenizer == BYTES:
        ids = "ids 0 to 255 are bytes, 256 ends a document"
        return ExtraFiles(eod_id, note=f"{missing}: its tokens are single bytes; {ids}")
    if not header.tokenizer.endswith(".json"):
        return ExtraFiles(eod_id, note=f"{missing}: its tokenizer is {header.tokenizer}")
    end = SpecialToken(header.eod_id, END)
    special: SpecialTokens = {"bos_token": end, "eos_token": end}
    try:
        content = find_tokenizer(header, stored).read_bytes()
        if masked:
            special = _special(header)
    except InputError as error:
        return ExtraFiles(eod_id, note=f"{missing}: {error}")
    return _tokenizer_files(eod_id, content, special, stored.config().model.seq_length)


def template_of(stored: StoredModel, kept: Path | None) -> ExtraFiles:
    """Return the file with the chat template of the conversations that the model was trained on.

    `transformers` prefers this file to the template in `kept`. The result has no file if the model
    was not trained on conversations, or if `kept` already has the same template.
    """
    try:
        file = template_file(stored)
    except InputError as error:
        if kept is None:  # no note here, because `tokenizer_of` already reports missing shards
            return ExtraFiles()
        return ExtraFiles(note=f"no {TEMPLATE} of its own is written: {error}")
    if file is None:
        return ExtraFiles()
    own = find_template(None, file, "").source
    before = PLAIN
    if kept is not None:
        before = find_template(kept / TOKENIZER, None, "").source
    note = f"{TEMPLATE} is the template of its training data"
    if before != PLAIN:
        if own == before:
            return ExtraFiles()
        note += ", in place of the template that came with the model"
    return ExtraFiles(files={TEMPLATE: own.encode()}, note=note)


def _tokenizer_files(
    eod_id: int | None, content: bytes, special: SpecialTokens, seq_length: int
) -> ExtraFiles:
    """Return two files: the unchanged tokenizer.json, and a tokenizer_config.json. The second file
    names the special tokens, and adds the special tokens that the tokenizer lacks."""
    known = {number: token for token, number in tokens_of(json.loads(content))}
    missing = {token.number: token.name for token in special.values() if token.number not in known}
    note = ""
    if missing and sorted([*known, *missing]) != list(range(len(known) + len(missing))):
        # `transformers` gives a new token the next free id, even if tokenizer_config.json says
        # another id. So if the ids of the missing tokens are not the next free ids, do not name
        # these tokens.
        unnamed = " and ".join(f"{token} has id {number}" for number, token in missing.items())
        note = f"{unnamed} here, and no name in tokenizer_config.json"
        special = {role: token for role, token in special.items() if token.number in known}
        missing = {}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "clean_up_tokenization_spaces": False,
        **{role: known.get(token.number, token.name) for role, token in special.items()},
        "added_tokens_decoder": {
            str(number): {"content": token, "special": True} for number, token in missing.items()
        },
    }
    text = json.dumps(config, indent=2) + "\n"
    return ExtraFiles(eod_id, {TOKENIZER: content, "tokenizer_config.json": text.encode()}, note)


def _special(header: ShardHeader) -> SpecialTokens:
    """Return the special tokens of a masked language model. Raise InputError if the shards cannot
    be read."""
    vocabulary = read_vocabulary(Dataset(Path(header.path).parent), whole_words=False)
    return {
        name: SpecialToken(getattr(vocabulary, role), SPECIAL_NAMES[role][0])
        for role, name in ROLES.items()
    }
