"""Renders hostile chat templates, each within a limit of processor time, and prints a JSON line for each.

A template that keeps one operation of Python busy ends this process by SIGPROF, after the line with its name.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llama_core.text.template.budget import bounded
from llama_core.text.template.environment import compile_template
from llama_core.text.template.marked_text import MarkedText, concat

LIMIT_S: Final = 6.0  # a rendering ends itself after 2 s
MAX_GROWTH: Final = 768 * 2**20  # of the address space
LONG_LIST: Final = (
    "{% set s = 'x' * 4000000 %}{% set t = 'x' * 3999999 ~ 'y' %}{% set l = range(20000) | map(attribute='foo', "
)
LAZY: Final = LONG_LIST + "default=s) %}"
LISTED: Final = LONG_LIST + "default=s) | list %}"
HOLDERS: Final = "{% set h = [namespace(v='x' * 4000000)] * 60000 %}"
NUMBERS: Final = "{% set x = ('f' * 4000000) | int(base=16) %}{% set y = ('f' * 2000000) | int(base=16) %}"
SAME_HASH: Final = "{% set n %}{% for i in range(1, 90000) %}{{ i * 2305843009213693951 }} {% endfor %}{% endset %}"
TEMPLATES: Final[Mapping[str, str]] = {
    "percent_flags": "{{ ('%' ~ '0' * 60000) % 1 }}",
    "percent_digits": "{{ ('%.' ~ '1' * 60000) % 1 }}",
    "percent_name": "{{ ('%(' * 60000 ~ 'a' * 600000) % 1 }}",
    "percent_many": "{{ ('%s' * 190000) % ([1] * 190000) }}",
    "percent_zeros": "{{ '%000000001000000000d' % 1 }}",
    "percent_precision": "{{ '%.0000001000000000f' % 1 }}",
    "percent_repr": LISTED + "{{ '%r' % l }}",
    "percent_arguments": "{% set b = [('x' * 3000000)] %}{{ ('%s' * 50) | format(*([b] * 50)) }}",
    "braces_zeros": "{{ '{:000000001000000000d}'.format(1) }}",
    "braces_name": "{{ ('{' ~ '1' * 4000 ~ '}').format(1) }}",
    "odd": "{{ '%999999999d' is odd }}",
    "divisible": "{{ '%999999999d' is divisibleby 1 }}",
    "round_floor": "{{ 1 | round(1000000000, 'floor') }}",
    "round_common": "{{ 1 | round(-1000000000) }}",
    "round_text": "{{ 'abc' | round(9, 'floor') }}",
    "rfind": "{{ ('a' * 400000).rfind('ab' ~ 'a' * 200000) }}",
    "rindex": "{{ ('a' * 400000).rindex('ab' ~ 'a' * 200000) }}",
    "rpartition": "{{ ('a' * 400000).rpartition('ab' ~ 'a' * 200000) }}",
    "rsplit": "{{ ('a' * 400000).rsplit('ab' ~ 'a' * 200000) }}",
    "strip": "{{ ('b' * 1000000).strip('a' * 1000000 ~ 'b') }}",
    "lstrip": "{{ ('b' * 1000000).lstrip('a' * 1000000 ~ 'b') }}",
    "trim": "{{ ('b' * 1000000) | trim('a' * 1000000 ~ 'b') }}",
    "int_remainder": NUMBERS + "{{ x % (y + 2) }}",
    "int_division": NUMBERS + "{{ x // (y + 2) }}",
    "range_bounds": "{{ range(0, 2305843009213693951 * 90000, 2305843009213693951) | unique | list | length }}",
    "unique": SAME_HASH + "{{ n.split() | map('int') | unique | list | length }}",
    "list_in": LISTED + "{{ t in l }}",
    "lazy_in": LAZY + "{{ t in l }}",
    "lazy_in_test": LAZY + "{{ [t] | select('in', l) | list }}",
    "loop_in": LAZY + "{% for a in l %}{{ (t, 1) in loop }}{% endfor %}",
    "list_count": LISTED + "{{ l.count(t) }}",
    "list_index": LISTED + "{{ l.index(t) }}",
    "list_equal": LISTED + "{{ l == l[1:] + [t] }}",
    "list_text": LISTED + "{{ l }}",
    "list_lower": LISTED + "{{ l is lower }}",
    "changed": LISTED + "{% for i in range(9) %}{{ loop.changed(l[:]) }}{% endfor %}",
    "arguments": LAZY + "{% macro f() %}{{ varargs.count(t) }}{% endmacro %}{{ f(*l) }}",
    "views": "{{ dict(a=[('\U0010ffff' * 7000000)]).values() }}",
    "sort_keys": HOLDERS + "{{ h | sort(attribute='v', case_sensitive=true) | length }}",
    "sort_names": "{{ [1, 2] | sort(false, false, ',' * 9000000) }}",
    "max_keys": HOLDERS + "{{ h | max(attribute='v', case_sensitive=true) }}",
    "separators": "{{ range(1000) | list | tojson(separators=('a' * 1000000, ':')) }}",
    "json_indent": "{{ [[[[[1]]]]] | tojson(indent='a' * 9000000) }}",
    "json_escapes": "{{ ['\x01' * 12000000] | tojson }}",
    "split_parts": "{{ ('aa ' * 2500000).split() | length }}",
    "split_separator": "{{ ('aa,' * 2500000).split(',') | length }}",
    "lines": "{{ ('aa\\n' * 2500000).splitlines() | length }}",
    "spans": "{% set x = (['<', messages[0].content] * 40000) | join %}{{ x.split('<') | length }}",
    "stride": "{% set x = 'a' * 9000000 %}{{ [x[::-1], x[::-1], x[::-1], x[::-1]] | length }}",
    "title": "{{ ('a ' * 4000000) | title | length }}",
}  # fmt: skip


def render(source: str) -> str:
    """How the rendering ended."""
    template, _ = compile_template(source)
    try:
        with bounded(5):
            context = template.new_context({"messages": [{"content": MarkedText("Hello")}]})
            return f"{len(concat(list(template.root_render_func(context))))} characters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_GROWTH, used + MAX_GROWTH))
    for name in sys.argv[1:] or TEMPLATES:
        print(json.dumps({"begins": name}), flush=True)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        outcome = render(TEMPLATES[name])
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"name": name, "outcome": outcome, "cpu_s": round(LIMIT_S - left_s, 2)}), flush=True)


if __name__ == "__main__":
    main()
