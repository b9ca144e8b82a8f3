"""No template keeps one operation of Python busy, or makes a value that is not counted before."""

import json
import subprocess
import sys
from typing import Any

import pytest

from llama_core.text.template.budget import bounded
from llama_core.text.template.environment import compile_template
from llama_core.text.template.marked_text import MarkedText, concat
from tests.programs.hostile_templates import TEMPLATES

ENDS = {"int_remainder": "1 characters", "int_division": "1 characters"}  # a text that is no number is 0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """How each template ended. One that did not end within its processor time, and those after it, are absent."""
    program = [sys.executable, "-m", "tests.programs.hostile_templates"]
    lines = subprocess.run(program, capture_output=True, text=True, check=False).stdout.splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {line["name"]: line["outcome"] for line in found if "name" in line}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_costly_operation_is_refused_before_it_runs(name: str, outcomes: dict[str, str]) -> None:
    assert name in outcomes, f"this template or one before it did not end: {list(outcomes)[-1:]} was the last to end"
    if name in ENDS:
        assert outcomes[name] == ENDS[name]
    else:
        assert outcomes[name].startswith(("TemplateTooExpensive: ", "ValueError: ", "TypeError: "))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a-b-a'.rfind('a') }} {{ 'a-b'.rindex('b') }} {{ 'a-b-c'.rsplit('-', 1) | join('|') }}", "4 2 a-b|c"),
        ("{{ '--a--'.strip('-') }}{{ ' b ' | trim }}{{ 'abcd'[::-1] }}{{ 'a b'.split() | length }}", "abdcba2"),
        ("{{ '%5.1f|%03d|%s|%-3s|%x' % (1.25, 7, [1], 'a', 255) }}", "  1.2|007|[1]|a  |ff"),
        ("{{ '7' | int + '1f' | int(base=16) }} {{ '1.5' | float }} {{ 2.567 | round(2) }} {{ 'x' | int(4) }}",
         "38 1.5 2.57 4"),
        ("{{ [3, 1, 2] | sort | join }} {{ ['b', 'A'] | sort | join }} {{ [1, 2] | sort(reverse=true) | join }}",
         "123 Ab 21"),
        ("{{ [1, 2, 1, 'a', 'A'] | unique | join }} {{ ['b', 'A'] | min }} {{ [{'n': 1}, {'n': 2}] | max(attribute='n') }}",
         "12a A {'n': 2}"),
        ("{{ {'b': 1, 'a': 2} | dictsort }} {{ [] | min }}|", "[('a', 2), ('b', 1)] |"),
        ("{{ 1 < 2 < 3 }} {{ 'b' in 'abc' }} {{ 'x' not in ['y'] }} {{ 1 in ([0] | map('default', 1, true)) }}",
         "True True True True"),
        ("{{ 3 is odd }} {{ 4 is even }} {{ 6 is divisibleby 3 }} {{ 'a' is lower }} {{ 'a' is in ['a'] }}",
         "True " * 4 + "True"),
        ("{{ [1, 'é'] | tojson }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
         '[1, "é"] {"a":2,"b":1}'),
        ("{{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ 1 - 2 }} {{ 1 / 2 }} {{ [1] + [2] }} {{ 2 * [1] }}",
         "3 3 8 -1 0.5 [1, 2] [1, 1]"),
    ],
)  # fmt: skip
def test_what_templates_need_gives_what_python_and_jinja_give(source: str, expected: str) -> None:
    template, _ = compile_template(source)
    with bounded(0):
        assert concat(list(template.root_render_func(template.new_context({})))).plain() == expected


def test_a_megabyte_of_contents_is_far_from_the_bounds() -> None:
    source = """{% for m in messages %}{% set c = m.content.strip() %}{% if '</think>' in c %}
        {% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ c.rfind('</x>') }}{{ c.rsplit('</y>', 1)[0] }}
        {{ m | tojson }}{{ c.startswith('<tool>') and c.endswith('</tool>') }}{{ c | replace('a', 'b') }}{% endfor %}"""
    template, _ = compile_template(source)
    content = MarkedText("A line of a long document\n" * 2000)
    messages = [{"role": MarkedText("user"), "content": content} for _ in range(20)]
    with bounded(20 * len(content)):
        assert len(concat(list(template.root_render_func(template.new_context({"messages": messages}))))) > 2**20
