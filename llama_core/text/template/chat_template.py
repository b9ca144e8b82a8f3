"""The chat format of a model that brings its own Jinja2 template."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, cast

import jinja2
from jinja2 import meta, nodes

from llama_core.errors import ConfigError, InvalidDialog
from llama_core.text.chat_format import (
    NO_OPTIONS,
    Admit,
    ChatFormat,
    ChatOptions,
    Dialog,
    invalid_message,
    messages_of,
)
from llama_core.text.template.environment import (
    MAX_SECONDS,
    RefusedByTemplate,
    RenderContext,
    TemplateTooSlow,
    compile_template,
    strftime_at,
)
from llama_core.text.template.marked_text import MarkedText, concat, mark_contents
from llama_core.text.template.tool_style import ToolStyle, find_tool_style, writes_offer
from llama_core.text.tokenizers.tokenizer import TextPart, Tokenizer, is_encodable
from llama_core.text.tokenizers.vocabulary_tokenizer import end_names
from llama_core.text.tools.plain_dialog import has_tools
from llama_core.text.tools.tool import described

# Roles that templates know. They are words of the server, so `'<|' + role + '|>'` may become a control token.
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "tool_response", "ipython", "function"})
_TOOL_SYSTEM: Final = {"role": "system", "content": "You are a helpful assistant with some tools."}  # Phi-4-mini's own
MAX_MESSAGE_CHARS: Final = 500  # of the template's own words in an error


class TemplateChatFormat(ChatFormat):
    """Renders a dialog as the model's template says. Bound to one tokenizer; immutable."""

    name = "template"
    is_quick = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        origin: str = "chat_template",
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """origin: the template's file, for errors. special_tokens: further ones by name (pad_token), as variables of the
        template. Raises ConfigError that names the file of a template that cannot be used."""
        self._origin = origin
        try:
            self._template, tree = compile_template(source)
            self._reads = frozenset(meta.find_undeclared_variables(tree))
        except jinja2.TemplateSyntaxError as error:
            raise self._unusable(f"line {error.lineno}: {str(error.message)[:MAX_MESSAGE_CHARS]}") from None
        except (Exception, RecursionError) as error:  # Jinja2's and Python's compilers have many
            raise self._unusable(f"it cannot be compiled ({type(error).__name__})") from None
        self.template = source
        written = [node.data for node in tree.find_all(nodes.TemplateData)]
        written += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self._literals = "\n".join(written)
        self._has_thinking = any(node.attr == "thinking" for node in tree.find_all(nodes.Getattr))
        self._system_has_tools = "tools" in written and "tools" not in self._reads  # as in Phi-4-mini's
        self._tokenizer = self.guard(tokenizer)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._variables = {
            name: MarkedText.written(tokenizer.control_text(token_id))
            for name, token_id in ids.items()
            if token_id is not None
        } | {name: MarkedText.written(text) for name, text in special_tokens.items()}
        texts = tokenizer.control_texts
        self.stop_ids = frozenset(texts[name] for name in end_names(texts) if name in self._literals)
        self._try()

    def guard(self, tokenizer: Tokenizer) -> Tokenizer:
        return tokenizer.for_template(self._literals)

    @property
    def writes_tools(self) -> bool:
        return self._tool_style is not None

    @cached_property
    def _tool_style(self) -> ToolStyle | None:
        """How the template takes calls, found when the first request has tools."""
        return find_tool_style(self._probe) if "tools" in self._reads else None

    @cached_property
    def offers_tools(self) -> bool:
        return writes_offer(self._probe)

    def _probe(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]) -> str:
        return self._run(self._given([self._message(message) for message in messages], tools)).plain()

    def check(self, dialog: Dialog) -> None:
        """Checks types; the template itself decides on roles and their order."""
        for index, message in messages_of(dialog):
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise invalid_message(index, "role and content must be strings")
            if not all(is_encodable(text) for text in message.values() if isinstance(text, str)):
                raise invalid_message(index, "content contains a lone surrogate, which is not a character")

    def encode(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS, admit: Admit | None = None) -> list[int]:
        """Prompt ids: equal to those of the model's own tokenizer and template for dialogs without control tokens in them.

        Raises InvalidDialog in the template's words where it refuses the dialog. Asks `admit` once the prompt is rendered: a
        template may leave contents out.
        """
        self.check(dialog)
        prompt = self._rendered(dialog, options)
        if admit is not None:
            admit(self._tokenizer.min_tokens(len(prompt)))
        return self._tokenizer.encode_parts(text_parts(prompt))

    def render(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS) -> str:
        """The prompt's text. Raises what `encode` raises."""
        return self._rendered(dialog, options).plain()

    def _rendered(self, dialog: Dialog, options: ChatOptions) -> MarkedText:
        style = self._tool_style if options.tools or has_tools(dialog) else None
        messages = [self._message(message if style is None else style.styled(message)) for message in dialog]
        mark = f"[{secrets.token_hex(12)}] " if options.continue_final_message else ""
        if mark:
            messages[-1]["content"] = MarkedText(dialog[-1]["content"] + mark)
        tools = None
        if options.tools:
            tools = described(options.tools) if style is None else style.offered(options.tools)
        variables = mark_contents(options.template_variables) | self._given(messages, tools)
        variables["add_generation_prompt"] = options.add_generation_prompt
        if options.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", MarkedText(options.reasoning_effort))
        variables["strftime_now"] = strftime_at(options.now_s)
        prompt = self._run(variables)
        return _before(prompt, mark) if mark else prompt

    def _given(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The variables that every rendering has."""
        offered = mark_contents(tools)
        if tools and self._system_has_tools:
            system, *rest = messages if messages[0]["role"] == "system" else [self._message(_TOOL_SYSTEM), *messages]
            functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            messages = [system | {"tools": MarkedText(functions)}, *rest]
        return {
            **self._variables,
            **({"xml_tools": offered} if tools else {}),  # SmolLM3's
            "messages": messages,
            "tools": offered,
            "documents": None,
            "add_generation_prompt": True,
        }

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        marked: dict[str, Any] = mark_contents(message)
        if self._has_thinking and "reasoning_content" in marked:  # gpt-oss's name
            marked["thinking"] = marked["reasoning_content"]
        role = message["role"]
        if role == "developer" and "developer" not in self.template:
            role = "system"  # OpenAI's newer name
        marked["role"] = MarkedText.written(role) if role in ROLES else MarkedText(role)
        return marked

    def _run(self, variables: dict[str, Any]) -> MarkedText:
        try:
            return self._render(variables)
        except RefusedByTemplate as error:
            words = str(error.message).strip()[:MAX_MESSAGE_CHARS]
            raise InvalidDialog(words or "the model's chat template refuses this dialog") from None
        except Exception as error:  # whatever an operation of a template raises
            is_known = isinstance(error, jinja2.TemplateError | TemplateTooSlow)
            reason = str(error)[:MAX_MESSAGE_CHARS] if is_known else type(error).__name__
            raise InvalidDialog(f"messages: the model's chat template cannot render this dialog: {reason}") from None

    def _render(self, variables: dict[str, Any]) -> MarkedText:
        context = cast(RenderContext, self._template.new_context(variables))
        context.end_s = time.thread_time() + MAX_SECONDS
        return concat(self._template.root_render_func(context))

    def _try(self) -> None:
        """Render a small dialog, to find a template at the start that is too slow for any dialog."""
        try:
            self._render(self._given([self._message({"role": "user", "content": "Hello"})], None))
        except TemplateTooSlow as error:
            raise self._unusable(f"it cannot render one short message: {error}") from None
        except Exception:
            return  # it may need other messages than this one

    def _unusable(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._origin}: the chat template cannot be used: {problem}; set chat_template to another one, or "
            "chat_format to a built-in format",
            param="chat_template",
        )


def text_parts(prompt: MarkedText) -> list[TextPart]:
    """The prompt in parts: control tokens are parsed in the template's own text only. Own parts are as long as possible."""
    text, at = prompt.plain(), 0
    parts: list[TextPart] = []
    for begin, end in prompt.own:
        parts += [TextPart(text[at:begin], False), TextPart(text[begin:end], True)]
        at = end
    return [*parts, TextPart(text[at:], False)]


def _before(prompt: MarkedText, mark: str) -> MarkedText:
    """The prompt up to the mark at the end of the last message."""
    at = prompt.rfind(mark.strip())
    if at < 0:
        raise InvalidDialog(
            "messages: the model's chat template does not write the last message, so it cannot go on with it"
        )
    before = prompt.cut(0, at)
    return before if prompt.startswith(mark, at) else before.rstrip()  # the template has stripped the message
