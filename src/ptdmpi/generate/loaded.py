"""A trained model from which a program can get texts and probabilities."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ptdmpi.comm.world import World, end_together
from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.generate.generator import ROWS
from ptdmpi.generate.prompts import Given
from ptdmpi.generate.write import Writer
from ptdmpi.inference.model import InferenceModel


class LoadedModel:
    """A trained model with its tokenizer, on all ranks that the launcher started.

    Every rank calls every method with the same arguments, and gets the same results.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.model: InferenceModel = writer.model
        self.config: Config = writer.model.config
        self.checkpoint: Path = writer.stored.checkpoint

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special ids at its beginning or end."""
        return list(self._writer.text.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._writer.text.decode(ids)

    def generate(self, prompt: str | Sequence[str], **options: Any) -> list[str]:
        """Return the continuation of each prompt.

        `options` may have these options of `ptdmpi generate`: max_new_tokens, samples (for each
        prompt), temperature, top_k, top_p and seed. The texts do not depend on the layout. Raise
        InputError for a prompt that is not a text or that the model cannot continue, and TypeError
        for any other option.
        """
        prompts = _texts(prompt)
        writer = self._writer.changed(**options)
        world = writer.world
        given = [Given(text) for text in prompts]
        ready = world.on_root(lambda: writer.prepare(given))
        records = writer.continuations(given, ready)
        texts = [record["text"] for record in records]
        shared: list[str] = world.control.bcast(texts, root=0)
        return shared

    def log_probabilities(self, ids: Sequence[int]) -> list[float]:
        """Return the log probability in nats of each id in `ids` except the first, given all
        earlier ids. Raise InputError for fewer than 2 ids, and for more than `seq_length` + 1."""
        model = self.model
        most = model.seq_length + 1
        if not 2 <= len(ids) <= most:
            raise InputError(f"{len(ids)} ids; legal: 2 to {most}")
        tokens = torch.tensor(list(ids), device=model.device)[:, None]
        scored = model.log_probabilities(tokens[:-1], tokens[1:])
        model.finish()
        values = None if scored is None else scored[0][:, 0].tolist()
        shared: list[float] = model.share(values)
        return shared


def _texts(prompt: object) -> list[str]:
    """Return a list of prompts. Raise InputError, on all ranks, unless `prompt` is a text or a
    sequence of texts."""
    if isinstance(prompt, str):
        return [prompt]
    kind = type(prompt).__name__
    if isinstance(prompt, Iterable):
        prompts = list(prompt)
        texts = [text for text in prompts if isinstance(text, str)]
        if len(texts) == len(prompts):
            return texts
        kind += " with values that are not texts"
    raise SharedInputError(f"prompt is of the type {kind}; legal: a text, or a list of texts")


def load(
    run: str | Path,
    *,
    layout: str | None = None,
    precision: str | None = None,
    adapter: str | Path | None = None,
    tokenizer: str | None = None,
    ema: bool = False,
) -> LoadedModel:
    """Load the newest checkpoint of `run`, which is a run directory, a checkpoint, or a converted
    model.

    `layout` is text such as "t=2,p=2", with the sizes of the axes over which one replica of the
    model is divided. If `layout` is None, the layout of the training run is used if there are
    enough ranks. `precision` None means the precision of the training run. `adapter` is the
    directory of adapters that are applied to the model. `tokenizer` is "bytes", the path of a
    tokenizer.json or of its folder, or the name of a model on the Hugging Face hub; None means the
    tokenizer of the training data. A model that was trained on a dataset of your own needs a
    tokenizer. If `ema` is True, the moving average of the weights is loaded. Every rank calls this
    function. Raise InputError, on all ranks, if the model cannot be loaded. After the load, an
    exception that one rank does not catch ends all ranks.
    """
    world = World()
    end_together(world)
    options = {
        "layout": layout,
        "precision": precision,
        "adapter": None if adapter is None else Path(adapter),
        "tokenizer": tokenizer,
        "ema": ema,
        "max_new_tokens": None,
        "samples": 1,
        "batch": ROWS,
        "temperature": 1.0,
        "top_k": None,
        "top_p": 1.0,
        "seed": 0,
    }
    return LoadedModel(Writer(Path(run), world, options))
