"""The interactive page of a run's report, as one HTML document that contains its script, its style
and its data."""

import base64
import hashlib
import json
import math
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.report.page.content import content, head
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.status import Watched

# A browser would end the element that contains the data at "</script", and begin a comment at
# "<!--". In JSON, these characters occur only inside strings, where each can be replaced by an
# escape.
ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def as_json(value: Any) -> str:
    """Return the value as JSON that can be placed in an HTML element. JSON has no NaN and no
    infinities, so these numbers become null."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).translate(ESCAPES)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def document(shown: dict[str, Any], every_s: float | None = None) -> str:
    """Return the page as HTML. `shown` is a dict with the entries `head` and `content`.

    If `every_s` is given, the page asks its server for new data every `every_s` seconds. The page
    has a content security policy: the browser runs only the script whose hash is in the policy, and
    loads nothing from other addresses. So no text of the run can be executed as a script.
    """
    script, style = (_part(name) for name in ("page.js", "page.css"))
    connect = "'none'" if every_s is None else "'self'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    data = as_json({**shown, "every_s": every_s})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(str(shown['head']['name']))}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body><main></main>"
        "<noscript>This page draws its curves with JavaScript.</noscript>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _part(name: str) -> str:
    return files("ptdmpi").joinpath("report", "page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash of a script or a style, in the form that a content security policy uses."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def write(run: RecordedRun, foreseen: Timeline | None, path: Path) -> None:
    """Write the page of a run to `path`. `foreseen` is the timeline of the predicted step. Raise
    OSError if the file cannot be written."""
    first = head(Watched(run.path).status(), run.problems)
    shown = {"head": first, "content": content(run, foreseen)}
    path.write_text(document(shown), encoding="utf-8")
