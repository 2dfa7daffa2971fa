"""Programs that a model writes, judged by tests: pass@k (Chen et al. 2021, arXiv 2107.03374).

A file has one JSON object a line, as HumanEval has them: `prompt` is the beginning of a program,
`test` defines `check(candidate)`, `entry_point` names the function that it is called with.
"""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from os import cpu_count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptdmpi.config import InputError, SharedInputError
from ptdmpi.evaluate.answers import Stop, cut
from ptdmpi.evaluate.sandbox import PASSED, Sandbox
from ptdmpi.evaluate.tasks import values_of
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import Text
from ptdmpi.inference.lines import numbered_lines

if TYPE_CHECKING:  # it starts MPI, and files are also read where there is none
    from ptdmpi.inference.model import InferenceModel

ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of a function (Chen et al. 2021)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that of k samples at least one is right, without bias from `samples` of which
    `right` are: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, equation 1). Raises ValueError unless
    1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right")
    return float(1 - Fraction(comb(samples - right, k), comb(samples, k)))


@dataclass(frozen=True)
class CodeTask:
    """The beginning of a program, and what judges it. `place`: file and line, for messages."""

    prompt: str
    test: str
    entry_point: str
    place: str

    def program(self, written: str) -> str:
        """The whole program whose coming to its end means that the tests passed."""
        return f"{self.prompt}{written}\n{self.test}\ncheck({self.entry_point})\n"


def read(path: Path) -> list[CodeTask]:
    """The tasks of a file. Raises InputError with the line."""
    found = []
    for place, line in numbered_lines(path, "task"):
        values = values_of(line, place, "prompt")
        for key in ("test", "entry_point"):
            if not isinstance(values.get(key), str):
                raise InputError(f"{place}: no text in the field {key!r}")
        if not values["entry_point"].isidentifier():
            raise InputError(f"{place}: 'entry_point' = {json.dumps(values['entry_point'])}")
        found.append(CodeTask(values["prompt"], values["test"], values["entry_point"], place))
    return found


@dataclass(frozen=True)
class CodeAsking:
    """How many programs are written for each task, how, and for which k they are counted."""

    samples: int
    sampling: Sampling
    max_new_tokens: int
    ks: tuple[int, ...]
    sandbox: Sandbox

    def ask(self, model: "InferenceModel", text: Text, tasks: Sequence[CodeTask]) -> dict[str, Any]:
        """The shares of tasks that are solved; every rank calls it, rank 0 runs what was written.
        Raises InputError on every rank."""
        room = model.seq_length - self.max_new_tokens
        if room < 1:
            raise SharedInputError(
                f"--max-new-tokens {self.max_new_tokens}; legal: 1 to {model.seq_length - 1}"
            )
        stop = Stop(text, ENDS)
        encoded = [text.prompt(task.prompt) for task in tasks]
        prompts = [
            Prompt(ids[-room:], self.max_new_tokens, number * self.samples + k, stop)
            for number, ids in enumerate(encoded)
            for k in range(self.samples)
        ]
        found = generate(model, prompts, self.sampling, text.ends)
        written = [
            cut(text.behind(prompt.ids, one.ids), ENDS)
            for prompt, one in zip(prompts, found, strict=True)
        ]
        world = model.axes.world
        outcomes = None
        if world.rank == 0:
            rows = (task for task in tasks for _ in range(self.samples))
            programs = [task.program(one) for task, one in zip(rows, written, strict=True)]
            outcomes = judged(programs, self.sandbox)
        truncated = sum(len(ids) > room for ids in encoded)
        return {"truncated": truncated, **self.result(world.broadcast_object(outcomes))}

    def result(self, outcomes: Sequence[str]) -> dict[str, Any]:
        """The scores of what became of all samples, task by task; `outcomes` are counted, too."""
        n = self.samples
        right = [outcomes[i : i + n].count(PASSED) for i in range(0, len(outcomes), n)]
        shares = {f"pass@{k}": sum(pass_at_k(n, c, k) for c in right) / len(right) for k in self.ks}
        counts = Counter(one for one in outcomes if one != PASSED)
        failures = ", ".join(f"{count} {why}" for why, count in counts.most_common(5))
        return {"items": len(right), "samples": n, **shares, "failures": failures or "none"}


def judged(programs: Sequence[str], sandbox: Sandbox) -> list[str]:
    """What became of each program, several at a time."""
    with ThreadPoolExecutor(max(1, (cpu_count() or 1) // 2)) as several:
        return list(several.map(sandbox.run, programs))
