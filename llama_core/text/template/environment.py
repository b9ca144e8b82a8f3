"""Compiles a chat template in Jinja2's immutable sandbox, as transformers does, with the template's own text marked.

A template is the operator's file. One that repeats without end is stopped by the clock, which each body and call checks.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final, cast

from jinja2 import filters, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import soft_str

from llama_core.text.template.marked_text import MarkedText, concat

MAX_SECONDS: Final = 2.0  # of the rendering thread's processor time; a usual dialog takes a millisecond


class RefusedByTemplate(TemplateError):
    """The template called `raise_exception`."""


class TemplateTooSlow(Exception):
    """A rendering takes more time than any dialog may."""


class RenderContext(Context):
    """The variables of one rendering, and its end in processor time of the thread."""

    end_s = math.inf

    def check_clock(self) -> None:
        """Raises TemplateTooSlow."""
        if time.thread_time() > self.end_s:
            raise TemplateTooSlow(f"it takes more than {MAX_SECONDS:g} s")


class _Generator(CodeGenerator):
    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        self.writeline("context.check_clock()")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(group)!r})"


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    context_class = RenderContext
    concat = staticmethod(concat)
    own = staticmethod(MarkedText.written)

    def __init__(self) -> None:
        extensions = [_GenerationTag, LoopControls]
        # Constants that the optimizer folds would lose their marks.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self.filters |= {"join": _join, "safe": soft_str, "tojson": _tojson}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_at(None)}

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        cast(RenderContext, __context).check_clock()
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """None for MarkedText.format, which allows no attributes."""
        is_own = getattr(value, "__func__", None) is MarkedText.format
        return None if is_own else super().wrap_str_format(value)


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return filters.sync_do_join(context, value, concat((d,)), attribute)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise RefusedByTemplate(str.__str__(str(message)))


def strftime_at(now_s: int | None) -> Callable[[str], str]:
    """`strftime_now` at a time in seconds since 1970; None for the clock's."""
    return lambda form: (datetime.now() if now_s is None else datetime.fromtimestamp(now_s)).strftime(str.__str__(form))


def compile_template(source: str) -> tuple[Template, nodes.Template]:
    """The compiled template and its syntax tree. Raises TemplateSyntaxError, or any error of Jinja2's or Python's compilers
    for a damaged source."""
    environment = TemplateEnvironment()
    tree = environment.parse(source)
    code = environment.compile(tree, filename="<chat template>")
    return Template.from_code(environment, code, environment.make_globals(None)), tree
