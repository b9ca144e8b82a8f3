"""Compiles a chat template: Jinja2's sandbox, with the template's own text marked and every operation counted.

`compile_template` refuses what chat templates do not need (other templates, unknown filters) by name. Generated code calls
`environment.step` at the beginning of each body, so nothing repeats uncounted; it evaluates no constants at compile time.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.environment import Template
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama_core.text.template import budget, conditions
from llama_core.text.template.arithmetic import OPERATORS
from llama_core.text.template.filters import FILTERS, GLOBALS, TemplateNamespace, metered, percent
from llama_core.text.template.formatting import as_text
from llama_core.text.template.marked_text import TEXT_METHODS, MarkedText, concat

MAX_TEMPLATE_CHARS: Final = 256 * 2**10  # published templates have up to 30,000
MAX_ARGUMENTS: Final = 64
_REFUSED_NODES: Final = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Block,
    nodes.ScopedEvalContextModifier,
)
_METERED: Final = "_metered"  # the filter around what a loop iterates over
_DICT_METHODS: Final = frozenset({"get", "items", "keys", "values"})
_LIST_METHODS: Final = frozenset({"index", "count"})


class _Generator(CodeGenerator):
    """Marks constants and counts steps in the code that Jinja2 generates."""

    environment: "TemplateEnvironment"

    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        self.writeline("environment.step()")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.compared(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} environment.{'container' if node.op in ('in', 'notin') else 'compared'}(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._weighed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _weighed(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")

    def _literal(self, text: str) -> str:
        return f"environment.literals[{self.environment.literal(text)}]"

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return node.data

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")


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
    """The sandbox of one template."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(concat)
    step = staticmethod(budget.step)
    text = staticmethod(as_text)
    compared = staticmethod(conditions.compared)
    container = staticmethod(conditions.container)

    def __init__(self) -> None:
        extensions = [_GenerationTag, LoopControls]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self.literals: list[MarkedText] = []
        self._literal_index: dict[str, int] = {}
        self.filters = {name: _counting(function) for name, function in FILTERS.items()}
        self.filters[_METERED] = metered
        tests: dict[str, Any] = {**self.tests, **conditions.TESTS}
        self.tests = {name: _counting(function) for name, function in tests.items()}
        self.globals = dict(GLOBALS)

    def literal(self, text: str) -> int:
        """The index in `literals` of a text that the template has in its source."""
        if text not in self._literal_index:
            self._literal_index[text] = len(self.literals)
            self.literals.append(MarkedText.written(text))
        return self._literal_index[text]

    def joined(self, values: Iterable[object]) -> str:
        return concat([as_text(value) for value in values])

    def weighed(self, value: Any) -> Any:
        budget.weigh(value)
        return value

    # What a template may reach

    def getattr(self, obj: Any, attribute: str) -> Any:
        value = MarkedText(obj) if type(obj) is str else obj
        if isinstance(value, str | list | tuple):
            budget.walk(value)  # its methods read all of it
        return super().getattr(value, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget.step(1 + len(obj) // 16 if isinstance(argument, slice) and isinstance(obj, list | tuple) else 1)
        return super().getitem(MarkedText(obj) if type(obj) is str else obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # MarkedText.format allows no attributes

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, MarkedText):
            return attr in TEXT_METHODS
        if isinstance(obj, dict):
            return attr in _DICT_METHODS
        if isinstance(obj, list | tuple):
            return attr in _LIST_METHODS
        return isinstance(obj, LoopContext | Macro | TemplateNamespace)

    def is_safe_callable(self, obj: Any) -> bool:
        return True  # everything that a template can reach has passed `is_safe_attribute`, or is in GLOBALS

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _count_arguments(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.step()
        return percent(left, right) if operator == "%" and isinstance(left, str) else OPERATORS[operator](left, right)


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _count_arguments(args, kwargs)
        return function(*args, **kwargs)

    call.__dict__.update(getattr(function, "__dict__", {}))  # whether it takes the context or the environment
    return call


def _count_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(args) + len(kwargs) > MAX_ARGUMENTS:
        raise TypeError(f"a call has {MAX_ARGUMENTS} arguments at most")
    budget.walk(*args, *kwargs.values())


def compile_template(source: str) -> tuple[Template, nodes.Template]:
    """The compiled template and its syntax tree. Raises TemplateSyntaxError, or any error of Jinja2's or Python's compilers
    for a damaged source."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateSyntaxError(f"it has more than {MAX_TEMPLATE_CHARS} characters", 1)
    environment = TemplateEnvironment()
    tree = environment.parse(source)
    _check_tags(tree)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, _METERED, [], [], None, None, lineno=loop.lineno)
    tree.set_environment(environment)
    code = environment.compile(tree, filename="<chat template>")
    return Template.from_code(environment, code, environment.make_globals(None)), tree


def _check_tags(tree: nodes.Template) -> None:
    """Raises TemplateSyntaxError for a tag that chat templates do not have. Jinja2 itself refuses unknown filters and tests:
    now, or in the branch of a condition when it is rendered."""
    for node in tree.find_all(_REFUSED_NODES):
        name = type(node).__name__.lower()
        raise TemplateSyntaxError(f"the tag {name!r} is not supported in a chat template", node.lineno)
