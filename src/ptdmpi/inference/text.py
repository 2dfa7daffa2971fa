"""Conversion between texts and ids by the tokenizer with which a model was trained."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import numpy as np

from data_prep.vocabulary import MarkedTokenizer, Tokenizer, load_tokenizer, tokenizer_file
from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, ChatTemplate, find_template
from ptdmpi.data.words import TOKENIZER, tokens_of
from ptdmpi.inference.stored import KEPT, StoredAdapter, StoredModel, open_model
from ptdmpi.inference.tokenizer import (
    find_tokenizer,
    kept_files,
    own_dataset,
    shard_header,
    template_file,
    tokenizer_sha256,
)


@dataclass(frozen=True)
class Text:
    """A model's tokenizer and its special ids.

    `prefix` has the ids that come before every text, for example LLaMA's <s>. `ends` are the ids
    that end a text. `eod` is the end-of-text id from which a model continues an empty text.
    """

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    ends: frozenset[int]
    eod: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the prefix.

        Raise InputError if the text cannot be encoded as UTF-8. For example, one half of a UTF-16
        surrogate pair cannot be encoded.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{text[:40]!r} is not UTF-8: {error.reason}") from None
        return self.tokenizer.encode([text])[0].tolist()

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, beginning with the prefix; the result is never empty."""
        return [*self.prefix, *self.encode(text)] or [self.eod]

    @property
    def special(self) -> frozenset[str]:
        """Return the names by which a chat template writes special tokens."""
        names: frozenset[str] = getattr(self.tokenizer, "special", frozenset())
        return names

    def marked(self, text: str) -> list[int]:
        """Return the ids of a text that a chat template has made. In such a text, special tokens
        are written as their names."""
        tokenizer = cast(MarkedTokenizer, self.tokenizer)
        return tokenizer.encode_marked([text])[0][0].tolist()

    def behind(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that the ids `ids` add if they follow the ids `before`.

        If `ids` were decoded alone, some tokenizers would leave out a space at the beginning.
        """
        head = self.decode(before)
        whole = self.decode([*before, *ids])
        if whole.startswith(head):
            return whole[len(head) :]
        return self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self.tokenizer.decode(np.array(ids, dtype=np.int64))


MENDED = "give --tokenizer bytes or --tokenizer FILE, a tokenizer.json or its folder"


def find_text(stored: StoredModel, given: str | None = None, mended: str = MENDED) -> Text:
    """Return the tokenizer of the model and its special ids. `given` is "bytes", or the path of a
    tokenizer.json or of the folder that contains it. If `given` is None, the model's own tokenizer
    is used.

    Raise InputError if no tokenizer is known; the error message ends with the advice `mended`.
    Also raise InputError if the model was trained with another tokenizer, or if the model was
    trained on a dataset of the user's own and has fewer ids than the tokenizer.
    """
    try:
        name = given or name_of(stored)
    except InputError as error:
        raise InputError(f"{error}; {mended}") from None
    try:
        tokenizer = load_tokenizer(name)
    except ImportError as error:
        raise InputError(f"tokenizer {name}: {error}; pip install 'ptdmpi[data]'") from None
    known = tokenizer_sha256(stored)
    if known not in (None, tokenizer.sha256):
        raise InputError(
            f"tokenizer {name} has sha256 {tokenizer.sha256[:12]}, the model expects {known[:12]}: "
            "its ids mean other text; legal: the tokenizer with which the model was trained"
        )
    if own_dataset(stored) is not None and tokenizer.vocab_size > stored.vocab_size:
        raise InputError(
            f"tokenizer {name} has {tokenizer.vocab_size} ids, the model has a vocabulary of "
            f"{stored.vocab_size}; legal: a tokenizer with at most {stored.vocab_size} ids"
        )
    prefix: tuple[int, ...] = ()
    ends = {_end_of(stored, tokenizer)}
    # this condition is true if another program trained the model
    if kept_files(stored) is not None and not stored.datasets:
        ends = ends_of(stored) or ends
        prefix = _prefix(name)
    beyond = sorted(token for token in {*prefix, *ends} if token >= stored.vocab_size)
    if beyond and min(ends) >= stored.vocab_size:
        raise InputError(
            f"tokenizer {name} ends a text with id {beyond[0]}, the model has a vocabulary of "
            f"{stored.vocab_size}: give the --tokenizer with which it was trained"
        )
    return Text(tokenizer, prefix, frozenset(ends), min(ends))


def _end_of(stored: StoredModel, tokenizer: Tokenizer) -> int:
    """Return the id that marks the end of a document in the data on which the model was trained.

    The shards of the data record this id. The tokenizer's own id is used only if there are no
    shards, because the files that define the tokenizer's id may have changed since the shards were
    made.
    """
    try:
        header = shard_header(stored)
    except InputError:  # the shards are no longer at the recorded path
        return tokenizer.eod_id
    return tokenizer.eod_id if header is None else header.eod_id


def find_chat(
    stored: StoredModel, text: Text, adapter: StoredAdapter | None = None
) -> ChatTemplate | None:
    """Return the chat template with which the model was trained; None if the model was trained
    without a chat template.

    The result is the first of these templates that exists: the template of the conversations on
    which ptdmpi trained the `adapter`, the template of the conversations on which ptdmpi trained
    the model, and the template that came with a model from Hugging Face. Raise InputError if a
    shard or a template cannot be read.
    """
    if not hasattr(text.tokenizer, "encode_marked"):
        return None
    given = None
    if adapter is not None:
        given = template_file(adapter)
    given = given or template_file(stored)
    kept = kept_files(stored)
    if given is None and (kept is None or stored.datasets):
        return None  # in this case the model was trained on plain text
    own = None if kept is None else kept / TOKENIZER
    template = find_template(own, given, text.decode([text.eod]))
    if given is None and template.source == PLAIN:
        return None
    return template


def name_of(stored: StoredModel) -> str:
    """Return the name or the path of the model's own tokenizer, as an argument of `load_tokenizer`.

    A model with a head for a task has the tokenizer that the task names, or else the tokenizer of
    the model from which its training began. Raise InputError if the tokenizer is not known.
    """
    task = stored.tree.get("task", {})
    if task.get("tokenizer"):
        return str(task["tokenizer"])
    # A converted model has its own tokenizer. Do not open the model at `began` for a converted
    # model: `began` may be the path of the converted model itself, and then the function would call
    # itself without end.
    converted = (stored.path / KEPT).is_dir()
    if task.get("kind", "none") != "none" and stored.began is not None and not converted:
        return name_of(open_model(stored.began))
    own = own_dataset(stored)
    if own is not None:
        raise InputError(f"{stored.path} was trained on {own}, which names no tokenizer file")
    header = shard_header(stored)
    if header is not None:
        if tokenizer_file(header.tokenizer) is None:
            return header.tokenizer
        return str(find_tokenizer(header, stored))
    kept = kept_files(stored)
    if kept is not None and (kept / TOKENIZER).is_file():
        return str(kept / TOKENIZER)
    raise InputError(f"{stored.path} does not say which tokenizer it has")


def token_ids(name: str) -> dict[str, int]:
    """Return the id of each token of a tokenizer.json; {} for other tokenizers.

    Raise InputError if the file cannot be used.
    """
    file = tokenizer_file(name)
    if file is None or file.suffix != ".json":
        return {}
    try:
        return dict(tokens_of(json.loads(read_file(file))))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: is not a tokenizer.json: {error}") from None


def ends_of(stored: StoredModel) -> set[int]:
    """Return the ids that end a text. The ids are read from files that came with a model from
    Hugging Face.

    The files are config.json and generation_config.json of the model, or of the model from which
    its training began. Raise InputError if one of the files is not JSON.
    """
    kept = kept_files(stored)
    if kept is None:
        return set()
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (kept / name).is_file():
            continue
        try:
            value = json.loads((kept / name).read_bytes())["eos_token_id"]
        except KeyError:
            continue
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{kept / name} is not a JSON object: {error}") from None
        values = value if isinstance(value, list) else [value]
        ends |= {token for token in values if isinstance(token, int)}
    return ends


def _prefix(name: str) -> tuple[int, ...]:
    """Return the special ids that the tokenizer itself puts before a text."""
    file = tokenizer_file(name)
    if file is None or file.suffix == ".model":
        return ()
    from tokenizers import Tokenizer as HuggingFace

    encoding = HuggingFace.from_file(str(file)).encode("a")
    pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    special = takewhile(lambda pair: pair[1], pairs)
    return tuple(token for token, _ in special)
