"""Three computations about a training run: its duration from its speed, its speed from its
duration, and the best model size for a budget of FLOPs."""

import math
from typing import NamedTuple

from ptdmpi.base.errors import InputError
from ptdmpi.base.words import short
from ptdmpi.config.presets import model_presets
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import model_of
from ptdmpi.plan.shape.parameters import active_count, parameter_count

DAY_S = 86400
MODEL_FLOPS, HARDWARE_FLOPS = 6, 8  # FLOPs per token and parameter, without and with recomputation
RECOMPUTED = "with full recomputation: Narayanan et al. 2021, equation 4"
# number of training tokens per parameter of a model of the best size (Hoffmann et al. 2022, arXiv
# 2203.15556, Table 3)
TOKENS_PER_PARAMETER = 20
CURVE = 60  # Number of points of a drawn curve.


class TrainingWork(NamedTuple):
    """The training of a model with P `parameters` on T `tokens` by n `ranks`.

    The training takes `factor` T P FLOPs. The factor is 6, or 8 if full recomputation is counted
    (Narayanan et al. 2021, equation 4).
    """

    parameters: float
    tokens: float
    ranks: int

    def days(self, flops_per_s: float, factor: int = MODEL_FLOPS) -> float:
        """Return the duration in days if each rank reaches `flops_per_s` (X): `factor` T P / (n X)
        seconds, converted to days."""
        return factor * self.tokens * self.parameters / (self.ranks * flops_per_s) / DAY_S

    def flops_per_s(self, days: float, factor: int = MODEL_FLOPS) -> float:
        """Return the FLOP/s that each rank must reach for a training of `factor` T P FLOPs in the
        given number of days."""
        return factor * self.tokens * self.parameters / (self.ranks * days * DAY_S)


def days_answer(
    pricer: Pricer,
    ranks: int,
    tokens: float,
    *,
    taken: float | None = None,
    utilisation: float | None = None,
) -> Reply:
    """Return the answer about a training on `tokens` tokens with `ranks` ranks. If `taken` (the
    duration in days) is given, the answer is the model FLOPs utilisation (MFU). If `utilisation`
    (the MFU, as a fraction) is given, the answer is the duration.

    Raises InputError unless exactly one of `taken` and `utilisation` is given. Also raises
    InputError if the training would need more FLOP/s than the device's peak.
    """
    if (taken is None) == (utilisation is None):
        raise InputError("give either --days or --utilisation")
    config, peak = pricer.model.config, pricer.machine.peak
    count = active_count(config, pricer.model.vocab_size)
    training = TrainingWork(count, tokens, ranks)
    if taken is None:
        assert utilisation is not None
        taken = training.days(peak * utilisation)
    model = training.flops_per_s(taken)
    hardware = training.flops_per_s(taken, HARDWARE_FLOPS)
    chip = pricer.cluster.device.name
    if model > peak:
        raise InputError(
            f"{tokens:.3g} tokens in {taken:g} days are {model / 1e12:.0f} TFLOP/s per rank, and "
            f"{chip} has {peak / 1e12:.0f}: at least {training.days(peak):.1f} days"
        )
    return Reply(
        short=f"{short(count)} parameters on {short(tokens)} tokens with {ranks:,} ranks: "
        f"{taken:.1f} days are {model / 1e12:.1f} TFLOP/s per rank, {model / peak:.1%} of the peak "
        f"of {chip}.",
        rows=[
            ["FLOPs", "TFLOP/s per rank", "of the peak", ""],
            _speed_row("6 P T", model, peak, "the model's work"),
            _speed_row("8 P T", hardware, peak, RECOMPUTED),
        ],
        numbers={
            "parameters": count,
            "tokens": tokens,
            "ranks": ranks,
            "days": taken,
            "model_tflops_per_rank": model / 1e12,
            "hardware_tflops_per_rank": hardware / 1e12,
            "mfu": model / peak,
            "hfu": hardware / peak,
        },
        title=f"{pricer.model.name}, {short(tokens)} tokens, {ranks:,} x {chip}",
        panels=[
            Panel(
                "utilisation of the peak, %",
                "days",
                {"6 P T": _days_curve(training, peak)},
                mark=(100 * model / peak, f"{taken:.1f} days"),
            )
        ],
    )


def _days_curve(training: TrainingWork, peak: float) -> list[tuple[float, float]]:
    """Return the duration of a training by utilisation, as points (utilisation of the peak in %,
    days), from 10 % to 70 %."""
    shares = [0.1 + 0.6 * i / (CURVE - 1) for i in range(CURVE)]
    return [(100 * share, training.days(peak * share)) for share in shares]


def _speed_row(counted: str, flops_per_s: float, peak: float, meaning: str) -> list[str]:
    return [counted, f"{flops_per_s / 1e12:.1f}", f"{flops_per_s / peak:.1%}", meaning]


class Loss(NamedTuple):
    """The loss L(N, D) = E + A / N^alpha + B / D^beta of a model with N parameters after D tokens,
    in nats per token: Hoffmann et al. 2022, equation 10, with the fitted constants of that
    paper."""

    least: float = 1.69
    a: float = 406.4
    b: float = 410.7
    alpha: float = 0.34
    beta: float = 0.28

    def at(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model with `parameters` parameters after `tokens` tokens."""
        return self.least + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def best(self, flops: float) -> float:
        """Return the number of parameters N with which a budget of C = `flops` FLOPs gives the
        lowest loss. The budget is 6 N D, where D is the number of tokens.

        By equation 4 of Hoffmann et al. 2022, N is G (C / 6)^(beta / (alpha + beta)), with the
        constant G = (alpha A / (beta B))^(1 / (alpha + beta)).
        """
        power = 1 / (self.alpha + self.beta)
        scale = (self.alpha * self.a / (self.beta * self.b)) ** power
        return float(scale * (flops / MODEL_FLOPS) ** (self.beta * power))


def optimal(flops: float) -> float:
    """Return the number of parameters N for a budget of `flops` = 6 N D FLOPs, if the number of
    tokens D is 20 N (`TOKENS_PER_PARAMETER`)."""
    return math.sqrt(flops / (MODEL_FLOPS * TOKENS_PER_PARAMETER))


def size_answer(flops: float) -> Reply:
    """Return the answer with the best size of a model for a budget of `flops` FLOPs, the presets
    closest to this size, and a curve of the loss by model size."""
    best, loss = optimal(flops), Loss()
    fitted = loss.best(flops)
    sizes = {
        name: parameter_count((model := model_of(name, keys)).config, model.vocab_size)
        for name, keys in model_presets().items()
        # leave out models with experts, because the loss was fitted to dense models
        if not keys.get("experts")
    }
    near = sorted(sizes, key=lambda name: abs(math.log(sizes[name] / best)))[:5]
    near.sort(key=lambda name: sizes[name])
    rows = [["preset", "parameters", "tokens", "per parameter", "loss of the fit"]]
    entries = []
    for name in near:
        count, tokens = sizes[name], flops / (MODEL_FLOPS * sizes[name])
        each, least = f"{tokens / count:.1f}", f"{loss.at(count, tokens):.3f}"
        rows.append([name, short(count), short(tokens), each, least])
        entries.append({"preset": name, "parameters": count, "tokens": tokens})
    span = [best * 10 ** (-1 + 2 * i / (CURVE - 1)) for i in range(CURVE)]
    curve = [(n / 1e9, loss.at(n, flops / (MODEL_FLOPS * n))) for n in span]
    return Reply(
        short=f"With {flops:.3g} FLOPs, train {short(best)} parameters on "
        f"{short(TOKENS_PER_PARAMETER * best)} tokens: 20 tokens per parameter.",
        rows=rows,
        numbers={
            "flops": flops,
            "parameters": best,
            "tokens": TOKENS_PER_PARAMETER * best,
            "parameters_of_the_fit": fitted,
            "presets": entries,
        },
        title=f"{flops:.3g} FLOPs: loss by size of the model",
        panels=[
            Panel(
                "billions of parameters",
                "loss (nats per token)",
                {"fit of Hoffmann et al. 2022": curve},
                mark=(best / 1e9, f"20 tokens each: {short(best)}"),
                logarithmic="x",
            )
        ],
        notes=(
            "Hoffmann et al. 2022: Table 3 has 20 tokens per parameter; the fit of their equation "
            f"10 alone gives {short(fitted)} parameters",
        ),
    )
