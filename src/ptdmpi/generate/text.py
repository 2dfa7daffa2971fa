"""Text in and out of a model, by its own tokenizer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import numpy as np

from data_prep.vocabulary import MarkedTokenizer, Tokenizer, load_tokenizer, tokenizer_file
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import PLAIN, ChatTemplate, find_template
from ptdmpi.data.words import tokens_of
from ptdmpi.inference.stored import KEPT, StoredAdapter, StoredModel, open_model
from ptdmpi.inference.tokenizer import (
    TOKENIZER,
    find_tokenizer,
    kept_files,
    shard_header,
    template_file,
    tokenizer_sha256,
)


@dataclass(frozen=True)
class Text:
    """Text to ids and back. `prefix`: what stands before every text (LLaMA's <s>); `ends`: the ids
    that end one; `eod`: what to begin with where there is nothing before."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    ends: frozenset[int]
    eod: int

    def encode(self, text: str) -> list[int]:
        """Without the prefix. Raises InputError for what is no text (half of a UTF-16 pair, or a
        byte of a command line that is not UTF-8)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{text[:40]!r} is no UTF-8: {error.reason}") from None
        return self.tokenizer.encode([text])[0].tolist()

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that begins here; never empty."""
        return [*self.prefix, *self.encode(text)] or [self.eod]

    @property
    def special(self) -> frozenset[str]:
        """Names that mean special tokens in a template's text."""
        found: frozenset[str] = getattr(self.tokenizer, "special", frozenset())
        return found

    def marked(self, text: str) -> list[int]:
        """The ids of a template's text, in which names of special tokens mean these."""
        tokenizer = cast(MarkedTokenizer, self.tokenizer)
        return tokenizer.encode_marked([text])[0][0].tolist()

    def behind(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of `ids` where they stand: some tokenizers leave out the first space of a
        text."""
        head, whole = self.decode(before), self.decode([*before, *ids])
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(np.array(ids, dtype=np.int64))


MENDED = "give --tokenizer bytes or --tokenizer FILE, a tokenizer.json"


def find_text(stored: StoredModel, given: str | None = None, mended: str = MENDED) -> Text:
    """The tokenizer of the model; `given`: "bytes", or the path of a tokenizer.json.

    Raises InputError where none is known (`mended`: what to do about it), or where it is not of
    this model.
    """
    kept, trained_here = kept_files(stored), bool(stored.datasets)
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
            f"tokenizer {name} has sha256 {tokenizer.sha256[:12]}, the model knows {known[:12]}: "
            "its ids mean another text; legal: the tokenizer that it was trained with"
        )
    special: tuple[int, ...] = ()
    ends = {_end_of(stored, tokenizer)}
    if kept is not None and not trained_here:
        ends, special = ends_of(stored) or ends, _prefix(name)
    beyond = sorted(one for one in {*special, *ends} if one >= stored.vocab_size)
    if beyond and min(ends) >= stored.vocab_size:
        raise InputError(
            f"tokenizer {name} ends a text by id {beyond[0]}, the model has a vocabulary of "
            f"{stored.vocab_size}: give the --tokenizer that it was trained with"
        )
    return Text(tokenizer, special, frozenset(ends), min(ends))


def _end_of(stored: StoredModel, tokenizer: Tokenizer) -> int:
    """The end of document that the model was trained with: its shards say it, for what stood beside
    the tokenizer when they were made need not stand there now."""
    try:
        header = shard_header(stored)
    except InputError:  # they have gone elsewhere
        header = None
    return tokenizer.eod_id if header is None else header.eod_id


def find_chat(
    stored: StoredModel, text: Text, beside: StoredAdapter | None = None
) -> ChatTemplate | None:
    """How the model was told who speaks: the template of the conversations that the adapters
    `beside` it, else itself, were trained on here, else of the model that came from Hugging Face;
    None where there is none. Raises InputError."""
    if not hasattr(text.tokenizer, "encode_marked"):
        return None
    given = None if beside is None else template_file(beside)
    given, kept = given or template_file(stored), kept_files(stored)
    if given is None and (kept is None or stored.datasets):
        return None  # trained on plain text
    own = None if kept is None else kept / TOKENIZER
    found = find_template(own, given, text.decode([text.eod]))
    return found if given is not None or found.source != PLAIN else None


def name_of(stored: StoredModel) -> str:
    """What `load_tokenizer` takes for the model's own tokenizer: of a model with a head for a task
    the one that the task names, or that of the model that it began from. Raises InputError."""
    task, kept = stored.tree.get("task", {}), kept_files(stored)
    if task.get("tokenizer"):
        return str(task["tokenizer"])
    # a converted model, which has its own beside it, says that a training is to begin from it
    converted = (stored.path / KEPT).is_dir()
    if task.get("kind", "none") != "none" and stored.began is not None and not converted:
        return name_of(open_model(stored.began))
    header = shard_header(stored)
    if header is not None and tokenizer_file(header.tokenizer) is None:
        return header.tokenizer
    if header is not None:
        return str(find_tokenizer(header, stored))
    if kept is not None and (kept / TOKENIZER).is_file():
        return str(kept / TOKENIZER)
    raise InputError(f"{stored.path} does not say which tokenizer it has")


def token_ids(name: str) -> dict[str, int]:
    """Each token of a tokenizer and its id, where it is a tokenizer.json; else none. Raises
    InputError."""
    file = tokenizer_file(name)
    if file is None or file.suffix != ".json":
        return {}
    try:
        return dict(tokens_of(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: is no tokenizer.json: {error}") from None


def ends_of(stored: StoredModel) -> set[int]:
    """The ids that config.json and generation_config.json of a model from Hugging Face, or of the
    one that it began from, name as ends. Raises InputError."""
    found, kept = set[int](), kept_files(stored)
    for name in ("config.json", "generation_config.json"):
        if kept is not None and (kept / name).is_file():
            try:
                value = json.loads((kept / name).read_bytes())["eos_token_id"]
            except KeyError:
                continue
            except (ValueError, TypeError, RecursionError) as error:
                raise InputError(f"{kept / name} is no JSON object: {error}") from None
            values = value if isinstance(value, list) else [value]
            found |= {one for one in values if isinstance(one, int)}
    return found


def _prefix(name: str) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text."""
    file = tokenizer_file(name)
    if file is None or file.suffix == ".model":
        return ()
    from tokenizers import Tokenizer as HuggingFace

    found = HuggingFace.from_file(str(file)).encode("a")
    special = takewhile(
        lambda pair: pair[1], zip(found.ids, found.special_tokens_mask, strict=True)
    )
    return tuple(token for token, _ in special)
