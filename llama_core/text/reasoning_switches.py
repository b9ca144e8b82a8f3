"""The template variables that switch reasoning off. Clients send them to every model, also to those without such a switch."""

from dataclasses import replace
from typing import Final

from llama_core.errors import InvalidParameter
from llama_core.text.chat_format import ChatFormat, ChatOptions
from llama_core.text.reasoning import CLOSE, OPEN

SWITCHES: Final = ("enable_thinking", "thinking")  # Qwen's and DeepSeek's


def without_idle_switches(options: ChatOptions, chat_format: ChatFormat, *, may_reason: bool) -> ChatOptions:
    """The options without the switches that the format does not read and that are fulfilled anyway; it refuses the others.

    Null is fulfilled, as is the value that the format reads under the other name, and false where the format writes no
    reasoning. may_reason: whether the model may reason where the format is no template. Raises InvalidParameter for false where
    it always does.
    """
    given = options.template_variables
    if all(name not in given or chat_format.reads(name) for name in SWITCHES):
        return options
    template = chat_format.template
    reasons = may_reason if template is None else OPEN in template or CLOSE in template
    fulfilled: list[object] = [None]
    fulfilled += [given[name] for name in SWITCHES if name in given and chat_format.reads(name)]
    if not any(map(chat_format.reads, SWITCHES)):
        if reasons and (name := next((name for name in SWITCHES if given.get(name) is False), None)):
            raise InvalidParameter(
                f"chat_template_kwargs: {name} cannot be false: this model reasons in any case, its chat format has no switch",
                param="chat_template_kwargs",
            )
        fulfilled.append(False)

    def is_idle(name: str) -> bool:
        return name in SWITCHES and not chat_format.reads(name) and any(given[name] is value for value in fulfilled)

    return replace(options, template_variables={name: value for name, value in given.items() if not is_idle(name)})
