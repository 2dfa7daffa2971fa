"""Chat templates that come with a model, so from anybody: work without end, and deep nesting."""

import json

import pytest

from ptdmpi.config import InputError
from ptdmpi.data.chat_template import TOKENIZER_CONFIG, ChatTemplate, find_template

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOP = "{% for NAME in range(100000) %}"
ENDLESS = {
    "nested loops": LOOP.replace("NAME", "a") + LOOP.replace("NAME", "b") + "{% endfor %}" * 2,
    "nested loops over one list": (
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
    "a long text": "{{ 'a' * 10000000000 }}",
    "a long list": "{{ [1, 2] * 10000000000 }}",
    "a power": "{{ 9 ** 999999999 }}",
    "a product": (
        "{% set n = namespace(x=9 ** 999) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
        "{% endfor %}"
    ),
    "a wide number": "{{ '%999999999d' % 1 }}",
    "a wide field": "{{ '{:>9999999999}'.format(1) }}",
    "a long output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a text that doubles": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}"
    ),
    "a list that is filled": "{{ [1] | batch(999999999, 1) | list }}",
    "much memory in each of many turns": (
        "{% for i in range(99999) %}{% if ('x' * 9999999) | upper %}{% endif %}{% endfor %}"
    ),
}
NESTED = {
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_work_without_end_is_refused(source, monkeypatch):
    monkeypatch.setattr("ptdmpi.data.jinja.MOST_SECONDS", 0.5)
    with pytest.raises(InputError, match=r"chat template of it says: (more than|a )"):
        ChatTemplate(source, "it").render(TURNS)


@pytest.mark.parametrize("source", NESTED.values(), ids=NESTED)
def test_deep_nesting_is_refused(source):
    with pytest.raises(InputError, match="chat template of it"):
        ChatTemplate(source, "it").render(TURNS)


def test_a_deeply_nested_file_is_refused(tmp_path):
    (tmp_path / TOKENIZER_CONFIG).write_text("[" * 100_000)
    with pytest.raises(InputError, match=TOKENIZER_CONFIG):
        find_template(tmp_path / "tokenizer.json", None, "")


def test_limits_hold_up_no_conversation():
    """Loops know their length and place as ever, and each rendering has turns of its own."""
    source = (
        "{% for message in messages %}{{ loop.index }}/{{ loop.length }}{{ message.content * 2 }}"
        "{% if not loop.last %},{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, "it")
    for _ in range(3):
        assert template.render(TURNS) == "1/2aa,2/2bb"
    many = [{"role": "user", "content": json.dumps(n)} for n in range(10_000)]
    assert template.render(many).endswith("10000/1000099999999")
