"""The best checkpoint interval for a given failure rate, and the resulting goodput, which is the
fraction of the time that is spent on useful training.

A job fails at random, on average every M seconds. On n nodes, M is 1/n of the mean time between
failures of one node. The job saves a checkpoint after every τ seconds of training, and a save takes
δ seconds. After a failure, a restart takes R seconds, and the training since the last save is lost.
By Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps",
equation 13) the goodput is

    τ / (M exp(R / M) (exp((τ + δ) / M) - 1))

if the times between failures are exponentially distributed, and failures also happen while the job
saves or restarts. The goodput is largest where (1 - τ/M) exp(τ/M) = exp(-δ/M). If δ is much smaller
than M, τ is near Young's approximation sqrt(2 δ M) (Young 1974, "A first order approximation to the
optimum checkpoint interval").
"""

import math
from dataclasses import dataclass

from ptdmpi.base.errors import InputError
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.shape.parameters import parameter_count

STATE_BYTES = 12  # bytes per parameter: float32 weight and AdamW's two moments
HOUR_S, DAY_S = 3600, 86400
CURVE = 60  # number of points of a drawn curve


@dataclass(frozen=True)
class Failures:
    """The times, in seconds, that determine the goodput of a job. `between_s` is the mean time
    between failures. `save_s` is the time for which a save stops the training. `restart_s` is the
    time from a failure to the next step."""

    between_s: float
    save_s: float
    restart_s: float

    def useful(self, interval_s: float) -> float:
        """Return the goodput for a save after every `interval_s` seconds of training. The goodput
        is the fraction of the time that is spent on steps that are not lost in a failure."""
        mean = self.between_s
        try:
            spent = mean * math.exp(self.restart_s / mean)
            spent *= math.expm1((interval_s + self.save_s) / mean)
        except OverflowError:
            return 0.0
        return interval_s / spent

    @property
    def young_s(self) -> float:
        """Return Young's checkpoint interval sqrt(2 `save_s` `between_s`), in seconds."""
        return math.sqrt(2 * self.save_s * self.between_s)

    @property
    def best_s(self) -> float:
        """Find the checkpoint interval with the highest goodput by bisection, and return it in
        seconds."""
        wanted, low, high = math.exp(-self.save_s / self.between_s), 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if (1 - middle) * math.exp(middle) > wanted else (low, middle)
            )
        return high * self.between_s


def answer(
    pricer: Pricer,
    ranks: int,
    *,
    step_time_s: float,
    node_days: float,
    bytes_per_s: float,
    restart_s: float,
) -> Reply:
    """Return the best checkpoint interval for a training on `ranks` ranks. A step takes
    `step_time_s` seconds. On average, each node fails once in `node_days` days. All ranks together
    write a checkpoint at `bytes_per_s` bytes per second, and a restart takes `restart_s` seconds.

    Raises InputError if failures leave so little time that the goodput is below 0.1 %.
    """
    nodes = -(-ranks // pricer.cluster.node.devices)
    state = STATE_BYTES * parameter_count(pricer.model.config, pricer.model.vocab_size)
    failures = Failures(node_days * DAY_S / nodes, state / bytes_per_s, restart_s)
    best_s = failures.best_s
    useful = failures.useful(best_s)
    if useful < 1e-3:
        raise InputError(
            f"a failure every {failures.between_s:.0f} s leaves no time to save {state:.3g} bytes "
            f"({failures.save_s:.0f} s) and to restart ({restart_s:.0f} s)"
        )
    steps = max(1, round(best_s / step_time_s))
    tried = sorted({best_s / 8, best_s / 2, best_s, 2 * best_s, 8 * best_s})
    rows = [["save every", "steps", "useful", ""]]
    for interval_s in tried:
        mark = "best" if interval_s == best_s else ""
        every = f"{interval_s / 60:.1f} min"
        count = f"{max(1, round(interval_s / step_time_s))}"
        rows.append([every, count, f"{failures.useful(interval_s):.1%}", mark])
    return Reply(
        short=f"{nodes} nodes fail every {failures.between_s / HOUR_S:.1f} h: save every "
        f"{best_s / 60:.0f} minutes (checkpoint.every_steps = {steps}), for a goodput "
        f"of {useful:.1%}.",
        rows=rows,
        numbers={
            "nodes": nodes,
            "failures": {
                "between_s": failures.between_s,
                "save_s": failures.save_s,
                "restart_s": restart_s,
            },
            "parameters": state // STATE_BYTES,
            "checkpoint_bytes": state,
            "step_time_s": step_time_s,
            "every_s": best_s,
            "every_steps": steps,
            "young_s": failures.young_s,
            "useful": useful,
        },
        title=f"{pricer.model.name} on {ranks} ranks of {pricer.cluster.name}: when to save",
        panels=[_curve(failures)],
        notes=(
            f"a save of {state / 1e12:.2f} TB takes {failures.save_s:.0f} s, a restart "
            f"{restart_s:.0f} s; Young's interval would be {failures.young_s / 60:.0f} min",
        ),
    )


def _curve(failures: Failures) -> Panel:
    best_s = failures.best_s
    span = [best_s * 10 ** (-1.2 + 2.4 * i / (CURVE - 1)) for i in range(CURVE)]
    return Panel(
        "minutes of training between saves",
        "goodput (useful share of the time)",
        {"goodput": [(interval_s / 60, failures.useful(interval_s)) for interval_s in span]},
        mark=(best_s / 60, f"best: {best_s / 60:.1f} min"),
        logarithmic="x",
    )
