"""Compiling chat templates: Jinja in a sandbox, with the functions that Hugging Face's offer.

Importing Jinja takes long, so `chat_template` imports this module with the first template that a
program compiles, not with every training.
"""

import json
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}, which encloses what a model writes."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.mark_answer: Callable[[str], str] = str

    def parse(self, parser: Any) -> Any:
        """Turn the block into a call of `_marked` on its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return self.mark_answer(caller())


_Generation.tags = {"generation"}


def compiled(source: str, mark_answer: Callable[[str], str]) -> Template:
    """Compile the Jinja text `source`; the template passes the text of each {% generation %} block
    through `mark_answer`. Raise ValueError if `source` is no template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    generation = environment.extensions[_Generation.identifier]
    assert isinstance(generation, _Generation)
    generation.mark_answer = mark_answer
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(str(error)) from None


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(reason: str) -> None:
    raise ValueError(reason)
