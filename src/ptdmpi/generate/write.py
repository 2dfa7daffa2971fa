"""From prompts as text to continuations as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.generate.generator import Prompt, check, generate
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import Text, find_text
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel

MAX_NEW_TOKENS = 100


def write(run: Path, world: World, **options: Any) -> list[dict[str, Any]]:
    """`samples` continuations of each prompt, on rank 0; every rank calls it.

    `options` are those of `ptdmpi generate`. Raises InputError on every rank.
    """
    chosen = {key: options[key] for key in ("temperature", "top_k", "top_p", "seed")}
    sampling = world.on_root(lambda: Sampling(**chosen))
    model, stored = open_inference(run, world, options["layout"], options["precision"])
    writer = _Writer(model, stored, options)
    prompts, ends = world.on_root(writer.prepare)
    found = generate(model, prompts, sampling, ends)
    if world.rank:
        return []
    return [
        {
            "prompt": writer.texts[number // options["samples"]],
            "text": writer.text.behind(prompt.ids, one.ids),
            "prompt_tokens": len(prompt.ids),
            "ids": one.ids,
            "reason": one.reason,
        }
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True))
    ]


class _Writer:
    """What rank 0 alone does: text to ids and back."""

    text: Text

    def __init__(
        self, model: InferenceModel, stored: StoredModel, options: Mapping[str, Any]
    ) -> None:
        self.model, self.stored, self.options = model, stored, options
        self.texts = options["prompts"] or ("",)

    def prepare(self) -> tuple[list[Prompt], frozenset[int]]:
        """Raises InputError."""
        options, seq_length = self.options, self.model.seq_length
        self.text = find_text(self.stored, options["tokenizer"])
        prompts: list[Prompt] = []
        for one in self.texts:
            ids = self.text.prompt(one)
            room = max(1, min(MAX_NEW_TOKENS, seq_length - len(ids)))
            length = room if options["max_new_tokens"] is None else options["max_new_tokens"]
            check(Prompt(ids, length), self.model)
            first = len(prompts)
            prompts += [Prompt(ids, length, first + k) for k in range(options["samples"])]
        return prompts, self.text.ends
