"""An adapter for lm-evaluation-harness (Gao et al. 2021). The adapter answers the three kinds of
requests of the harness with a model in any parallel layout.

Rank 0 runs the harness and makes the requests. All other ranks help to compute each answer, until
rank 0 has no more requests. Only `simple_evaluate` needs the package `lm_eval` (extra `eval`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ptdmpi.config import InputError, SharedInputError
from ptdmpi.evaluate.answers import Stop, cut
from ptdmpi.evaluate.choice import continuation
from ptdmpi.evaluate.perplexity import windows
from ptdmpi.evaluate.scoring import Request, score
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import Sampling
from ptdmpi.inference.model import InferenceModel
from ptdmpi.inference.text import Text

MAX_NEW_TOKENS = 256  # the default of lm-evaluation-harness for max_gen_toks


class Writing(NamedTuple):
    """A prompt of the harness, and the options for its continuation. The continuation ends
    before the first occurrence of a string in `until`."""

    ids: list[int]
    max_new_tokens: int
    until: list[str]
    sampling: Sampling


class Harness:
    """An implementation of the methods of `lm_eval.api.model.LM`. Rank 0 makes the requests, and
    the other ranks call `serve`."""

    def __init__(self, model: InferenceModel, text: Text) -> None:
        self.model = model
        self.text = text
        self.world = model.axes.world

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, is greedy) for each pair (context, continuation).

        The second value is True if greedy decoding gives this continuation.
        """
        wanted = [continuation(self.text, context, rest) for context, rest in pairs]
        scores = self._ask("score", wanted)
        return [(answer.log_likelihood, answer.greedy) for answer in scores]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each complete text in nats.

        The first token is predicted after an end-of-document token. A text that is longer than
        `seq_length` is scored in windows of `seq_length` tokens. Neighbouring windows share one
        token: the last label of a window is the first input of the next window. Only the last
        window overlaps the window before it by more tokens, so that the last window also has
        `seq_length` tokens. Each token is scored only once.
        """
        parts: list[list[Request]] = []
        length = self.model.seq_length
        for text in texts:
            ids = [self.text.eod, *self.text.encode(text)]
            parts.append(
                [
                    Request(ids[window.first : window.end], window.scored - window.first)
                    for window in windows(len(ids), 0, length, length)
                ]
            )
        scores = iter(self._ask("score", [request for part in parts for request in part]))
        return [sum(next(scores).log_likelihood for _ in part) for part in parts]

    def generate_until(self, pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the continuation of each (context, options), up to the first string in
        options["until"].

        The options have the names and meanings of the harness.
        """
        wanted = [self._wanted(context, options) for context, options in pairs]
        return self._ask("write", wanted)

    def close(self) -> None:
        """End the loop of `serve` on the other ranks."""
        self._ask("close", None)

    def serve(self) -> None:
        """Help rank 0 to answer requests, until rank 0 calls `close`. Every rank except rank 0
        calls this method."""
        while self._answer(*self.world.broadcast_object(None)) is not None:
            pass

    def _wanted(self, context: str, options: Mapping[str, Any]) -> Writing:
        length = options.get("max_gen_toks", MAX_NEW_TOKENS)
        length = max(1, min(length, self.model.seq_length - 1))
        until = options.get("until") or []
        if isinstance(until, str):
            until = [until]
        temperature = 0.0
        if options.get("do_sample"):
            temperature = float(options.get("temperature", 0.0))
        sampling = Sampling(
            temperature=temperature,
            top_p=float(options.get("top_p", 1.0)),
            top_k=options.get("top_k") or None,
        )
        ids = self.text.prompt(context)[-(self.model.seq_length - length) :]
        return Writing(ids, length, list(until), sampling)

    def _ask(self, kind: str, wanted: Any) -> Any:
        """Let all ranks answer a request, and return the answer. Only rank 0 calls this method."""
        return self._answer(*self.world.broadcast_object((kind, wanted)))

    def _answer(self, kind: str, wanted: Any) -> Any:
        """Answer a request of `kind` "score" or "write" on every rank; return None for "close"."""
        match kind:
            case "score":
                return score(self.model, wanted)
            case "write":
                return self._written(wanted)
        return None

    def _written(self, wanted: Sequence[Writing]) -> list[str]:
        """Return the continuation of each prompt. Prompts with equal sampling options are continued
        together."""
        written: dict[int, str] = {}
        for sampling in dict.fromkeys(prompt.sampling for prompt in wanted):
            prompts = [
                Prompt(prompt.ids, prompt.max_new_tokens, number, Stop(self.text, prompt.until))
                for number, prompt in enumerate(wanted)
                if prompt.sampling == sampling
            ]
            continuations = generate(self.model, prompts, sampling, self.text.ends)
            for prompt, new in zip(prompts, continuations, strict=True):
                text = self.text.behind(prompt.ids, new.ids)
                written[prompt.number] = cut(text, wanted[prompt.number].until)
        return [written[number] for number in range(len(wanted))]


def simple_evaluate(harness: Harness, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return, on rank 0, the results of the harness for the tasks `options["lm_eval"]`. On all
    other ranks, answer the requests and return {}.

    `options["lm_eval_path"]` is a folder with further task files. Raise InputError if the package
    `lm_eval` is missing, or if the harness does not know a task.
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
        """A model in the form that the harness expects. Each method receives requests of the
        harness, and passes their arguments on to the method of the same name in `Harness`."""

        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            """Return the log-likelihoods of continuations."""
            return harness.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            """Return the log-likelihoods of complete texts."""
            return harness.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """Return generated texts."""
            return harness.generate_until([request.args for request in requests])

    try:
        manager = TaskManager(include_path=options["lm_eval_path"])
        unknown = [name for name in options["lm_eval"] if name not in manager.all_tasks]
        if unknown:
            raise InputError(f"--lm-eval {unknown[0]}: the harness knows no such task")
        results = run(
            model=Adapter(),
            tasks=list(options["lm_eval"]),
            task_manager=manager,
            bootstrap_iters=0,
        )
    finally:
        harness.close()
    return results["results"]
