"""Turns a dialog into the prompt that Llama 2 chat models were trained on, id for id as Meta's reference does.

Decides which dialogs are well formed and that no message carries the template's own tags. Knows nothing of generation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypedDict

from llama_core.errors import InvalidDialog, SpecialTags
from llama_core.text.tokenizer import Tokenizer, is_encodable

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    role: Role
    content: str


Dialog = Sequence[Message]

B_INST: Final = "[INST]"
E_INST: Final = "[/INST]"
B_SYS: Final = "<<SYS>>\n"
E_SYS: Final = "\n<</SYS>>\n\n"
SPECIAL_TAGS: Final = (B_INST, E_INST, B_SYS.strip(), E_SYS.strip())
SAFE_RESPONSE: Final = "Error: special tags are not allowed as part of the prompt."

_ROLES: Final = ("system", "user", "assistant")


def validate_dialog(dialog: Dialog) -> None:
    """Checks the types, the roles' order (system?, user, assistant, ..., user) and that every content is text.

    Raises InvalidDialog that names the index of the first message at fault.
    """
    if isinstance(dialog, str | Mapping) or not isinstance(dialog, Sequence):
        raise InvalidDialog("messages must be a list of messages")
    if not dialog:
        raise InvalidDialog("messages must have at least 1 message")
    for index, message in enumerate(dialog):
        _validate_message(index, message)
    has_system = dialog[0]["role"] == "system"
    for index, message in enumerate(dialog):
        if index == 0 and has_system:
            continue
        expected = "user" if (index - has_system) % 2 == 0 else "assistant"
        if message["role"] != expected:
            order = "an optional system message, then user and assistant in turn"
            raise _invalid(index, f"role must be '{expected}', not '{message['role']}': {order}")
    if dialog[-1]["role"] != "user":
        raise _invalid(len(dialog) - 1, "role must be 'user': the last message asks for the answer")


def check_special_tags(tokenizer: Tokenizer, dialog: Dialog) -> None:
    """Raises SpecialTags that names the first message whose content holds a tag of the template.

    The tag is looked for in the text as written and as the model would read it: encoded and decoded again, which may
    rewrite characters. Takes a valid dialog.
    """
    tags = _tags_as_read(tokenizer)
    for index, message in enumerate(dialog):
        written = message["content"]
        if any(tag in written for tag in SPECIAL_TAGS) or any(tag in _as_read(tokenizer, written) for tag in tags):
            raise _special_tags(index)


def encode_dialog(tokenizer: Tokenizer, dialog: Dialog) -> list[int]:
    """Prompt ids of a dialog: BOS, round, EOS for each finished round, then BOS and the open turn.

    Raises InvalidDialog or SpecialTags, naming the message's index. Cost: every text is encoded about twice.
    """
    validate_dialog(dialog)
    check_special_tags(tokenizer, dialog)
    tags = _tags_as_read(tokenizer)
    ids: list[int] = []
    for last_index, text, has_system, is_open in _rounds(dialog):
        round_ids = tokenizer.encode(text, bos=True, eos=not is_open)
        read = tokenizer.decode(round_ids)
        # Exactly the template's own tags: none made up of a message and what the template put beside it.
        if [read.count(tag) for tag in tags] != [1, 1, int(has_system), int(has_system)]:
            raise _special_tags(last_index)
        ids += round_ids
    return ids


def min_dialog_tokens(tokenizer: Tokenizer, dialog: Dialog) -> int:
    """The fewest tokens that this dialog's prompt can take: refuses a huge one without encoding it.

    Raises InvalidDialog. Cheap: looks at lengths only.
    """
    validate_dialog(dialog)
    return sum(tokenizer.min_tokens(len(text)) + 2 - is_open for _, text, _, is_open in _rounds(dialog))


def _rounds(dialog: Dialog) -> Iterator[tuple[int, str, bool, bool]]:
    """(index of its last message, rendered text, has a system text, is still open) for each round."""
    system = dialog[0]["content"] if dialog[0]["role"] == "system" else None
    first = 0 if system is None else 1
    for index in range(first, len(dialog), 2):
        user = dialog[index]["content"]
        has_system = index == first and system is not None
        if has_system:
            user = f"{B_SYS}{system}{E_SYS}{user}"
        text = f"{B_INST} {user.strip()} {E_INST}"
        if index + 1 == len(dialog):
            yield index, text, has_system, True
        else:
            yield index + 1, f"{text} {dialog[index + 1]['content'].strip()} ", has_system, False


def _validate_message(index: int, message: object) -> None:
    if not isinstance(message, Mapping):
        raise _invalid(index, "a message must be an object with role and content")
    if message.get("role") not in _ROLES:
        raise _invalid(index, f"role must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if not isinstance(content, str):
        raise _invalid(index, "content must be a string")
    if not is_encodable(content):
        raise _invalid(index, "content contains a lone surrogate, which is not a character")


def _tags_as_read(tokenizer: Tokenizer) -> list[str]:
    """The tags as they look after encoding and decoding: the same for Llama, lower case for one that folds case."""
    return [_as_read(tokenizer, tag) for tag in SPECIAL_TAGS]


def _as_read(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, bos=False, eos=False))


def _invalid(index: int, problem: str) -> InvalidDialog:
    return InvalidDialog(f"messages[{index}]: {problem}", index=index, param=f"messages[{index}]")


def _special_tags(index: int) -> SpecialTags:
    tags = ", ".join(SPECIAL_TAGS)
    return SpecialTags(f"messages[{index}]: content must not contain the chat template's tags ({tags})", index=index)
