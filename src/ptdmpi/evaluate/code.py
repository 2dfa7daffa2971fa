"""Tests of programs that a model has written: pass@k (Chen et al. 2021, arXiv 2107.03374).

A file has one JSON object per line, in the form of HumanEval: `prompt` is the beginning of a
program, `test` defines `check(candidate)`, and `entry_point` names the function to be checked.
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
from ptdmpi.inference.lines import numbered_lines
from ptdmpi.inference.text import Text

if TYPE_CHECKING:  # this import starts MPI, but files are also read without MPI
    from ptdmpi.inference.model import InferenceModel

# a generated function ends where the first of these texts begins (Chen et al. 2021)
ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

    The estimate is 1 - C(n - c, k) / C(n, k), where c = `right` of n = `samples` are right (Chen et
    al. 2021, equation 1). Raise ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right")
    return float(1 - Fraction(comb(samples - right, k), comb(samples, k)))


@dataclass(frozen=True)
class CodeTask:
    """A task: the beginning of a program, and its test. `place` is the file and the line, for error
    messages."""

    prompt: str
    test: str
    entry_point: str
    place: str

    def program(self, written: str) -> str:
        """Return the complete program: the prompt, the model's text `written`, and the test. The
        program passes if it runs to its end."""
        return f"{self.prompt}{written}\n{self.test}\ncheck({self.entry_point})\n"


def read(path: Path) -> list[CodeTask]:
    """Return the tasks in a file. If a line is not a task, raise InputError with the number of the
    line."""
    tasks = []
    for place, line in numbered_lines(path, "task"):
        values = values_of(line, place, "prompt")
        for key in ("test", "entry_point"):
            if not isinstance(values.get(key), str):
                raise InputError(f"{place}: no text in the field {key!r}")
        if not values["entry_point"].isidentifier():
            raise InputError(f"{place}: 'entry_point' = {json.dumps(values['entry_point'])}")
        tasks.append(CodeTask(values["prompt"], values["test"], values["entry_point"], place))
    return tasks


@dataclass(frozen=True)
class CodeAsking:
    """The options for code tasks: how programs are generated, and the values of k (`ks`) for which
    pass@k is computed."""

    samples: int
    sampling: Sampling
    max_new_tokens: int
    ks: tuple[int, ...]
    sandbox: Sandbox

    def ask(self, model: "InferenceModel", text: Text, tasks: Sequence[CodeTask]) -> dict[str, Any]:
        """Return pass@k for the tasks. Every rank calls this method, and rank 0 runs the generated
        programs.

        Raise InputError on every rank if `max_new_tokens` leaves no room for a prompt.
        """
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
        continuations = generate(model, prompts, self.sampling, text.ends)
        written = [
            cut(text.behind(prompt.ids, new.ids), ENDS)
            for prompt, new in zip(prompts, continuations, strict=True)
        ]
        world = model.axes.world
        outcomes = None
        if world.rank == 0:
            rows = (task for task in tasks for _ in range(self.samples))
            programs = [task.program(end) for task, end in zip(rows, written, strict=True)]
            outcomes = judged(programs, self.sandbox)
        truncated = sum(len(ids) > room for ids in encoded)
        return {"truncated": truncated, **self.result(world.broadcast_object(outcomes))}

    def result(self, outcomes: Sequence[str]) -> dict[str, Any]:
        """Return pass@k and the number of failures of each kind. `outcomes` has the outcome of each
        sample, task by task."""
        n = self.samples
        right = [outcomes[i : i + n].count(PASSED) for i in range(0, len(outcomes), n)]
        shares = {f"pass@{k}": sum(pass_at_k(n, c, k) for c in right) / len(right) for k in self.ks}
        counts = Counter(outcome for outcome in outcomes if outcome != PASSED)
        failures = ", ".join(f"{count} {why}" for why, count in counts.most_common(5))
        return {"items": len(right), "samples": n, **shares, "failures": failures or "none"}


def judged(programs: Sequence[str], sandbox: Sandbox) -> list[str]:
    """Return the outcome of each program (see `Sandbox.run`). Several programs run at the same
    time."""
    with ThreadPoolExecutor(max(1, (cpu_count() or 1) // 2)) as several:
        return list(several.map(sandbox.run, programs))
