"""A chat template compiled: Jinja in a sandbox, with what Hugging Face's templates have at hand.

Loaded with the first template, not with every training: Jinja is dear to import.
"""

import json
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ptdmpi.data.chat_template import BEGIN, END


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what a model is to write."""

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


_Generation.tags = {"generation"}


def compiled(source: str) -> Template:
    """Raises ValueError for what is no template."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    made.globals["raise_exception"] = _refuse
    try:
        return made.from_string(source)
    except TemplateError as error:
        raise ValueError(str(error)) from None


def _refuse(reason: str) -> None:
    raise ValueError(reason)
