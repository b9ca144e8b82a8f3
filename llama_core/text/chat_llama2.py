"""Llama 2's chat format: the prompt that Llama 2 chat models were trained on, id for id as Meta's reference builds it.

Decides which dialogs are well formed, and that no message contains the format's own tags.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

from llama_core.errors import SpecialTags
from llama_core.text.chat_format import (
    NO_OPTIONS,
    Admit,
    ChatFormat,
    ChatOptions,
    Dialog,
    check_messages,
    invalid_message,
)
from llama_core.text.tokenizers.tokenizer import Tokenizer

B_INST: Final = "[INST]"
E_INST: Final = "[/INST]"
B_SYS: Final = "<<SYS>>\n"
E_SYS: Final = "\n<</SYS>>\n\n"
SPECIAL_TAGS: Final = (B_INST, E_INST, B_SYS.strip(), E_SYS.strip())
# For clients that render chats themselves; the server never renders it. With the tokenizer's `bos_token` and `eos_token`, and
# the names of control tokens read as these tokens, it gives the ids that `encode` gives.
_CLIENT_TEMPLATE: Final = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles: an optional system message, then user and assistant in turn') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + ((system if loop.first else '') + message['content']) | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


class _Round(NamedTuple):
    """A user message, the system message before it if there is one, and the assistant's answer if there is one."""

    last_index: int  # of its last message in the dialog
    text: str
    has_system: bool
    is_open: bool  # its answer is still to be written, or to be continued


class Llama2ChatFormat(ChatFormat):
    """`check`, then `encode`. Bound to one tokenizer; immutable."""

    name = "llama2"
    is_quick = True
    template = None
    client_template = _CLIENT_TEMPLATE
    answer_ending = " "

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self, dialog: Dialog) -> None:
        """Checks the types, the order of roles (system?, user, assistant, ..., user) and that every content is text.

        Raises InvalidDialog that names the index of the first message at fault.
        """
        _check(dialog, NO_OPTIONS)

    def check_special_tags(self, dialog: Dialog) -> None:
        """Raises SpecialTags that names the first message whose content contains a tag. Takes a dialog that `check` accepts.

        Looks for the tags in the text as written, and in the text as the model reads it: the tokenizer may rewrite characters.
        """
        for index, message in enumerate(dialog):
            written = message["content"]
            if any(tag in written for tag in SPECIAL_TAGS):
                raise _special_tags(index)
            if any(tag in self._as_read(written) for tag in self._tags_as_read):
                raise _special_tags(index)

    def min_tokens(self, dialog: Dialog) -> int:
        """The fewest tokens that the prompt can take. The format strips white space around contents and drops nothing else."""
        return self._tokenizer.min_tokens(sum(len(message["content"].strip()) for message in dialog))

    def encode(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS, admit: Admit | None = None) -> list[int]:
        """Prompt ids: BOS, round, EOS for each finished round, then BOS and the open round.

        Nothing begins the assistant's message, so without add_generation_prompt the dialog may only be complete as well. A
        final message that the answer continues leaves its round open. Raises InvalidDialog or SpecialTags, with the message's
        index. Encodes every text about twice.
        """
        _check(dialog, options)
        self.check_special_tags(dialog)
        ids: list[int] = []
        for each in _rounds(dialog, continues=options.continue_final_message):
            round_ids = self._tokenizer.encode(each.text, bos=True, eos=not each.is_open)
            read = self._tokenizer.decode(round_ids)
            # A message and the adjacent text of the format could form a tag together.
            expected = [1, 1, int(each.has_system), int(each.has_system)]
            if [read.count(tag) for tag in self._tags_as_read] != expected:
                raise _special_tags(each.last_index)
            ids += round_ids
        return ids

    @cached_property
    def _tags_as_read(self) -> list[str]:
        """The tags after encoding and decoding: the same for Llama 2, lower case for a tokenizer that folds case."""
        return [self._as_read(tag) for tag in SPECIAL_TAGS]

    def _as_read(self, text: str) -> str:
        return self._tokenizer.decode(self._tokenizer.encode(text, bos=False, eos=False))


def _rounds(dialog: Dialog, *, continues: bool) -> Iterator[_Round]:
    system = dialog[0]["content"] if dialog[0]["role"] == "system" else None
    first = 0 if system is None else 1
    for index in range(first, len(dialog), 2):
        user = dialog[index]["content"]
        has_system = index == first and system is not None
        if has_system:
            user = f"{B_SYS}{system}{E_SYS}{user}"
        text = f"{B_INST} {user.strip()} {E_INST}"
        if index + 1 == len(dialog):
            yield _Round(index, text, has_system, is_open=True)
        elif continues and index + 2 == len(dialog):
            yield _Round(index + 1, f"{text} {dialog[index + 1]['content'].strip()}", has_system, is_open=True)
        else:
            answered = f"{text} {dialog[index + 1]['content'].strip()} "
            yield _Round(index + 1, answered, has_system, is_open=False)


def _check(dialog: Dialog, options: ChatOptions) -> None:
    check_messages(dialog)
    has_system = dialog[0]["role"] == "system"
    for index, message in enumerate(dialog):
        if index == 0 and has_system:
            continue
        expected = "user" if (index - has_system) % 2 == 0 else "assistant"
        if message["role"] != expected:
            order = "an optional system message, then user and assistant in turn"
            raise invalid_message(index, f"role must be '{expected}', not '{message['role']}': {order}")
    last = dialog[-1]["role"]
    if options.continue_final_message and last != "assistant":
        raise invalid_message(len(dialog) - 1, "role must be 'assistant': the answer continues the last message")
    if options.add_generation_prompt and last != "user":
        raise invalid_message(len(dialog) - 1, "role must be 'user': the last message asks for the answer")


def _special_tags(index: int) -> SpecialTags:
    tags = ", ".join(SPECIAL_TAGS)
    place = f"messages[{index}]"
    return SpecialTags(f"{place}: content must not contain the chat template's tags ({tags})", index=index, param=place)
