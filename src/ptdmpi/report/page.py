"""The report on a run as one HTML page. The page contains all pictures and curves, and loads
nothing from a network."""

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ptdmpi.base.disk import read_file
from ptdmpi.base.words import counted
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.status import binned

POINTS = 400  # Maximum number of points in a curve.
# Sizes in pixels: the width and height of a curve's picture, and the margins for its axes.
WIDTH = 420
HEIGHT = 180
LEFT = 56
BOTTOM = 22
CURVES = {
    "loss": "loss (nats per token)",
    "tokens_per_s": "tokens/s",
    "grad_norm": "gradient norm, before clipping",
    "learning_rate": "learning rate",
    "mfu": "MFU",
    "step_time_s": "step time (s)",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.under { color: #666; margin-top: .2rem; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
tr { border-bottom: 1px solid #eee; }
img { max-width: min(100%, 56rem); } .curves { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; color: #444; }
svg text { font: 11px system-ui, sans-serif; fill: #666; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 13px; }
"""


def page(run: RecordedRun, rows: Sequence[tuple[str, str]], pictures: Iterable[Path]) -> str:
    """Return the page as HTML: the table `rows`, the curves, the `pictures` (PNG files), the
    configuration and the log."""
    last = run.steps[-1]
    name = escape(str(run.config["run"]["name"]))
    under = f"{last['layout']}, {counted(last['rank_count'], 'rank')}, "
    under += counted(last["step"], "step")
    table = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in rows)
    images = "".join(f"<p>{_image(path)}</p>" for path in pictures)
    details = "".join(
        f"<details><summary>{file}</summary><pre>{escape(text)}</pre></details>"
        for file, text in _texts(run.path)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{name}</h1><p class="under">{escape(under)}</p>'
        f"<h2>Numbers</h2><table>{table}</table>"
        f'<h2>Curves, over steps</h2><div class="curves">{"".join(_curves(run))}</div>'
        f"<h2>Pictures</h2>{images}<h2>Files</h2>{details}</body></html>\n"
    )


def _image(path: Path) -> str:
    """Return an HTML element that contains the data of a PNG file."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _texts(path: Path) -> list[tuple[str, str]]:
    """Return (name, text) for the configuration and for the last lines of the log."""
    texts = []
    for name, lines in (("config.toml", 0), ("log.txt", 200)):
        if (path / name).is_file():
            text = read_file(path / name).decode(errors="replace").splitlines()
            texts.append((name, "\n".join(text[-lines:])))
    return texts


def _curves(run: RecordedRun) -> Iterable[str]:
    """Yield an HTML figure for each curve that the run has recorded."""
    validations = [(record["step"], record["validation_loss"]) for record in run.validations]
    for key, title in CURVES.items():
        points = [(record["step"], record[key]) for record in run.steps if key in record]
        if points:
            caption = title
            dots = []
            if key == "loss" and validations:
                caption = f"{title}; dots: validation"
                dots = validations
            figure = svg(points, dots)
            yield f"<figure>{figure}<figcaption>{escape(caption)}</figcaption></figure>"


def svg(points: Sequence[tuple[float, float]], dots: Sequence[tuple[float, float]] = ()) -> str:
    """Return an SVG picture with a curve through `points`, and with separate `dots`.

    If there are more than POINTS points, neighbouring points are averaged. Values that are not
    finite are left out.
    """
    steps = binned([float(x) for x, _ in points], POINTS)
    values = binned([float(y) for _, y in points], POINTS)
    line = [(x, y) for x, y in zip(steps, values, strict=True) if math.isfinite(y)]
    shown = [(x, y) for x, y in dots if math.isfinite(y)]
    if not line:
        return f'<svg width="{WIDTH}" height="{HEIGHT}"><text x="60" y="90">no numbers</text></svg>'
    xs, ys = zip(*line, *shown, strict=True)
    first = min(xs)
    last = max(xs)
    low = min(ys)
    high = max(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        """Return the position of a point in pixels."""
        across = (x - first) / ((last - first) or 1.0)
        up = (y - low) / ((high - low) or 1.0)
        return LEFT + across * (WIDTH - LEFT - 8), 8 + (1 - up) * (HEIGHT - BOTTOM - 12)

    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in line))
    circles = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="#c8511b"/>'
        for a, b in (place(x, y) for x, y in shown)
    )
    base = HEIGHT - BOTTOM
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<path d="M{LEFT},4 V{base} H{WIDTH}" fill="none" stroke="#bbb"/>'
        f'<polyline points="{path}" fill="none" stroke="#1f4e8c" stroke-width="1.4"/>{circles}'
        f'<text x="{LEFT - 4}" y="14" text-anchor="end">{_number(high)}</text>'
        f'<text x="{LEFT - 4}" y="{base}" text-anchor="end">{_number(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{first:,.0f}</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 6}" text-anchor="end">{last:,.0f}</text></svg>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write(
    run: RecordedRun, rows: Sequence[tuple[str, str]], pictures: Iterable[Path], path: Path
) -> None:
    """Write the HTML page to `path`. Raise OSError if the file cannot be written."""
    path.write_text(page(run, rows, pictures), encoding="utf-8")
