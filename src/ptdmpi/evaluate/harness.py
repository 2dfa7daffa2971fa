"""The adapter for lm-evaluation-harness (Gao et al. 2021): its three questions, in any layout.

Rank 0 runs the harness and asks; the other ranks take part in each answer until it says that it is
done. The package `lm_eval` is needed by `simple_evaluate` alone (extra `eval`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ptdmpi.config import InputError, SharedInputError
from ptdmpi.evaluate.answers import Stop, cut
from ptdmpi.evaluate.choice import continuation
from ptdmpi.evaluate.perplexity import windows
from ptdmpi.evaluate.scoring import Request, score
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import Text
from ptdmpi.inference.model import InferenceModel

MAX_NEW_TOKENS = 256  # the harness' own default


class Harness:
    """The questions of `lm_eval.api.model.LM`; rank 0 asks, the others `serve`."""

    def __init__(self, model: InferenceModel, text: Text) -> None:
        self.model, self.text = model, text
        self.world = model.axes.world

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(context, continuation) -> (log-likelihood in nats, whether greedy decoding gives it)."""
        wanted = [continuation(self.text, context, rest) for context, rest in pairs]
        return [(one.log_likelihood, one.greedy) for one in self._ask("score", wanted)]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each whole text, its first token behind the end of a document; in
        windows of seq_length that have one token in common."""
        parts: list[list[Request]] = []
        for one in texts:
            ids = [self.text.eod, *self.text.encode(one)]
            length = self.model.seq_length
            found = windows(len(ids), 0, length, length)
            parts.append([Request(ids[a:end], first - a) for _, a, end, first in found])
        scores = iter(self._ask("score", [one for part in parts for one in part]))
        return [sum(next(scores).log_likelihood for _ in part) for part in parts]

    def generate_until(self, pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """(context, options) -> what is generated, up to the first of options["until"]."""
        wanted = [self._wanted(context, dict(options)) for context, options in pairs]
        return self._ask("write", wanted)

    def close(self) -> None:
        """Let the other ranks go."""
        self._ask("close", None)

    def serve(self) -> None:
        """What every rank but 0 does, until `close`."""
        while self._answer(*self.world.broadcast_object(None)) is not None:
            pass

    def _wanted(
        self, context: str, options: dict[str, Any]
    ) -> tuple[list[int], int, list[str], Sampling]:
        length = options.get("max_gen_toks", MAX_NEW_TOKENS)
        length = max(1, min(length, self.model.seq_length - 1))
        until = options.get("until") or []
        sampling = Sampling(
            temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            top_k=options.get("top_k") or None,
        )
        ids = self.text.prompt(context)[-(self.model.seq_length - length) :]
        return ids, length, [until] if isinstance(until, str) else list(until), sampling

    def _ask(self, kind: str, wanted: Any) -> Any:
        return self._answer(*self.world.broadcast_object((kind, wanted)))

    def _answer(self, kind: str, wanted: Any) -> Any:
        """On every rank; None means that nothing more comes."""
        if kind == "score":
            return score(self.model, wanted)
        if kind == "close":
            return None
        written: dict[int, str] = {}
        for sampling in dict.fromkeys(one[3] for one in wanted):
            chosen = [i for i, one in enumerate(wanted) if one[3] == sampling]
            prompts = [
                Prompt(ids, length, i, Stop(self.text, until))
                for i in chosen
                for ids, length, until, _ in [wanted[i]]
            ]
            found = generate(self.model, prompts, sampling, self.text.ends)
            for prompt, one in zip(prompts, found, strict=True):
                text = self.text.behind(prompt.ids, one.ids)
                written[prompt.number] = cut(text, wanted[prompt.number][2])
        return [written[i] for i in range(len(wanted))]


def simple_evaluate(harness: Harness, options: Mapping[str, Any]) -> dict[str, Any]:
    """The harness' results of its tasks `options["lm_eval"]`, on rank 0; nothing on others.

    Task files of one's own are found in `options["lm_eval_path"]`. Raises InputError.
    """
    world = harness.world
    try:
        from lm_eval.api.model import LM
        from lm_eval.evaluator import simple_evaluate as run
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SharedInputError(f"--lm-eval: {error}; pip install 'ptdmpi[eval]'") from None
    if world.rank:
        harness.serve()
        return {}

    class Adapter(LM):
        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            return harness.loglikelihood([one.args for one in requests])

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            return harness.loglikelihood_rolling([one.args[0] for one in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return harness.generate_until([one.args for one in requests])

    try:
        manager = TaskManager(include_path=options["lm_eval_path"])
        unknown = [one for one in options["lm_eval"] if one not in manager.all_tasks]
        if unknown:
            raise InputError(f"--lm-eval {unknown[0]}: the harness knows no such task")
        found = run(
            model=Adapter(),
            tasks=list(options["lm_eval"]),
            task_manager=manager,
            bootstrap_iters=0,
        )
    finally:
        harness.close()
    return found["results"]
