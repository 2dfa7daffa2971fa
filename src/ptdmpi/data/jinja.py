"""Compiling chat templates: Jinja in a sandbox, with the functions that Hugging Face provides for
templates.

Importing Jinja takes long, so `chat_template` imports this module only when a program compiles its
first template.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ptdmpi.base.heap import at_most

LIMITED = "limited"  # the name of the filter that counts the iterations of every loop.
MOST_TURNS = 1_000_000  # limit for loop iterations and function calls in one rendering.
MOST_LENGTH = 10_000_000  # limit for the length of a text or list that is made by repetition.
MOST_BITS = 10_000  # limit for the number of bits of the result of a power or product.
MOST_BYTES = 1 << 29  # limit for the memory that one rendering takes.
MOST_SECONDS = 20  # limit for the processor time of one rendering


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits for each rendering of a template. There are limits for the number
    of loop iterations and calls, for the time, for the length of repeated texts and lists, and for
    the size of powers and products. The limits are needed because a template comes with a
    downloaded model and may be malicious.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.begin()
        self.filters[LIMITED] = self._counted

    def begin(self) -> None:
        """Prepare a new rendering: set the counts of loop iterations and calls to 0, and restart
        the time limit."""
        self.turns_left = MOST_TURNS
        self.ends_s = time.thread_time() + MOST_SECONDS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, LIMITED, [], [], None, None, lineno=loop.lineno)
        return template

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop. Raise ValueError if all loops together have too many
        iterations."""
        for item in items:
            self._count()
            yield item

    def _count(self) -> None:
        self.turns_left -= 1
        if self.turns_left < 0:
            raise ValueError(f"more than {MOST_TURNS} loop iterations and calls")
        if time.thread_time() > self.ends_s:
            raise ValueError(f"more than {MOST_SECONDS} s of processor time")

    def call(self, *values: Any, **options: Any) -> Any:
        """Call a function or a macro, as a template requests. Raise ValueError if there are too
        many calls."""
        self._count()
        return super().call(*values, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a multiplication or a power, as a template requests. Raise ValueError if the
        result would be too large."""
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and right > 0 and left.bit_length() * right > MOST_BITS:
                raise ValueError(f"a power of more than {MOST_BITS} bits")
            if operator == "*" and left.bit_length() + right.bit_length() > MOST_BITS:
                raise ValueError(f"a product of more than {MOST_BITS} bits")
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                repeats = isinstance(repeated, str | list | tuple) and isinstance(times, int)
                if repeats and len(repeated) * times > MOST_LENGTH:
                    raise ValueError(f"a repetition of more than {MOST_LENGTH} items")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %} of a template, which encloses the text of
    an answer."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.mark_answer: Callable[[str], str] = str

    def parse(self, parser: Any) -> Any:
        """Replace the {% generation %} block by a call of `_marked` with the text of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return self.mark_answer(caller())


_Generation.tags = {"generation"}


def compiled(source: str, mark_answer: Callable[[str], str]) -> Callable[..., str]:
    """Compile the Jinja text `source`. Return a function that renders the template with keyword
    arguments, and replaces the text of each {% generation %} block by the result of `mark_answer`.
    Raise ValueError if `source` is not a template."""
    environment = _LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    generation = environment.extensions[_Generation.identifier]
    assert isinstance(generation, _Generation)
    generation.mark_answer = mark_answer
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        # compiling a template computes its constant expressions, so limit the memory of the
        # compilation as that of a rendering
        with at_most(MOST_BYTES):
            template = environment.from_string(source)
    # deep nesting exceeds the recursion limit of Jinja, or of Python's compiler
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from None

    def render(**values: Any) -> str:
        """Return the text of the template for the given values. Raise ValueError if the rendering
        exceeds a limit of work or memory."""
        environment.begin()
        try:
            with at_most(MOST_BYTES):
                return str(template.render(**values))
        except MemoryError:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB of memory") from None

    return render


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(reason: str) -> None:
    raise ValueError(reason)
