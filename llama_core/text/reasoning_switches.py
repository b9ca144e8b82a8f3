"""The template variables that switch reasoning off. Clients send them to every model, also to those without such a switch."""

from dataclasses import replace
from typing import Final

from llama_core.errors import InvalidParameter
from llama_core.text.chat_format import SAMPLE, ChatFormat, ChatOptions
from llama_core.text.reasoning import CLOSE, OPEN

SWITCHES: Final = ("enable_thinking", "thinking")  # Qwen's and DeepSeek's


def without_idle_switches(options: ChatOptions, chat_format: ChatFormat, *, may_reason: bool) -> ChatOptions:
    """The options without the switches that the format does not read and that are fulfilled anyway; it refuses the others.

    Null is fulfilled, as is the value that the format follows under the other name. Where the format follows neither name,
    true is fulfilled if the model reasons, else false. may_reason: whether the model may reason where the format is no
    template. Raises InvalidParameter for false where the model reasons nevertheless.
    """
    given = {name: options.template_variables[name] for name in SWITCHES if name in options.template_variables}
    if not given:
        return options
    followed = [name for name in SWITCHES if _follows(chat_format, name)]
    reasons = not followed and _reasons(chat_format, may_reason)
    for name, value in given.items():
        if value is False and (reasons or (name in followed and _opened(chat_format.sample_prompt(name, False)))):
            raise InvalidParameter(
                f"chat_template_kwargs: {name} cannot be false: this model reasons in any case, its chat format has no switch",
                param="chat_template_kwargs",
            )
    fulfilled: list[object] = [None, *(given[name] for name in followed if name in given)]
    if not followed:
        fulfilled.append(reasons)

    def is_idle(name: str) -> bool:
        return name in given and not chat_format.reads(name) and any(given[name] is value for value in fulfilled)

    kept = {name: value for name, value in options.template_variables.items() if not is_idle(name)}
    return replace(options, template_variables=kept)


def _follows(chat_format: ChatFormat, name: str) -> bool:
    """Whether the switch changes the prompt. A template may read it for the reasoning of earlier turns alone. One that cannot
    write the sample, because it asks for other messages, counts as following what it reads."""
    if not chat_format.reads(name):
        return False
    prompts = [chat_format.sample_prompt(name, value) for value in (True, False)]
    return prompts[0] != prompts[1] or not any(prompts)


def _reasons(chat_format: ChatFormat, may_reason: bool) -> bool:
    """Whether the model reasons before it answers, by a format without a switch."""
    template = chat_format.template
    if template is None:
        return may_reason
    opened = _opened(chat_format.sample_prompt())
    # A template that leaves out the reasoning of earlier turns, as R1-Distill's, is that of a model that writes it.
    return opened if opened is not None else OPEN in template or CLOSE in template


def _opened(prompt: str) -> bool | None:
    """Whether the answer begins within the reasoning; False behind a block that the prompt closes, None without any mark."""
    beginning = prompt.rpartition(SAMPLE)[2]  # a system prompt may name the marks
    opened, closed = beginning.rfind(OPEN), beginning.rfind(CLOSE)
    return None if opened == closed else opened > closed
