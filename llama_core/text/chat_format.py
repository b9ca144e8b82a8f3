"""The Protocol of a chat format: a dialog to prompt ids. `registry.find_chat_format` finds one by its name.

Knows nothing of generation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, NotRequired, Protocol, TypedDict

from llama_core.errors import InvalidDialog, NoChatTemplate
from llama_core.text.tokenizers.tokenizer import Tokenizer, is_encodable
from llama_core.text.tools.tool import Tool

Role = Literal["system", "user", "assistant", "ipython", "tool"]
ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant")

# The reference's answer to a dialog that contains the format's own tags.
SAFE_RESPONSE: Final = "Error: special tags are not allowed as part of the prompt."


class Message(TypedDict):
    role: Role
    content: str
    name: NotRequired[str]  # for templates that write it; the built-in formats do not
    # For formats that write tools (`ChatFormat.writes_tools`), in OpenAI's form, arguments as JSON text.
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


Dialog = Sequence[Message]
# Called with the fewest tokens that a prompt can take, before it is encoded; raises to refuse it.
Admit = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a dialog is written. template_variables: JSON values that a template reads by name; it ignores others. tools: for a
    format that writes tools. reasoning_effort: for a template that reads it. now_s: the time that a template reads, in seconds
    since 1970; None for the clock's."""

    add_generation_prompt: bool = True  # end with the beginning of the assistant's message
    continue_final_message: bool = False  # end inside the last message, which the answer goes on with
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    reasoning_effort: str | None = None
    now_s: int | None = None


NO_OPTIONS: Final = ChatOptions()


class ChatFormat(Protocol):
    """The prompt that a family of chat models was trained on. Bound to one tokenizer; immutable."""

    name: str  # as the argument `chat_format` has it, or "none"
    is_quick: bool  # whether `encode` takes time in proportion to the contents, so that short dialogs need no thread
    template: str | None  # Jinja2's source, if the format has one
    # Text that the format writes after each answer before end-of-sequence, and so the model too.
    answer_ending: str = ""
    result_role: Role = "user"  # of a message with a tool's result, where the format does not write tools itself

    stop_ids: frozenset[int] = frozenset()  # end the assistant's message, beside those of the tokenizer

    @property
    def client_template(self) -> str | None:
        """Jinja2's source of the prompt for clients that render chats themselves; None if there is none."""
        return self.template

    @property
    def writes_tools(self) -> bool:
        """Whether the format writes tools, calls and results. Otherwise `tools.plain_dialog` puts them in plain messages."""
        return False

    @property
    def offers_tools(self) -> bool:
        """Whether the format writes the tools that a request offers, if not calls. `tools.plain_dialog` then does not."""
        return False

    def guard(self, tokenizer: Tokenizer) -> Tokenizer:
        """`tokenizer` for plain prompts: their text becomes none of the tokens that the format itself writes."""
        return tokenizer

    def check(self, dialog: Dialog) -> None:
        """Raises InvalidDialog that names the index of the first message with a wrong type, role or content. Cheap."""

    def min_tokens(self, dialog: Dialog) -> int:
        """The fewest tokens that the prompt of `dialog` can take, from the lengths of its contents, to refuse a long dialog
        without encoding it. `dialog` need not be well formed, but every content is text."""
        return 0

    def encode(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS, admit: Admit | None = None) -> list[int]:
        """Prompt ids of `dialog`. Raises what `check` and `admit` raise, and SpecialTags that names the index of a message with
        a tag."""


def invalid_message(index: int, problem: str) -> InvalidDialog:
    """The error for the message at `index`."""
    return InvalidDialog(f"messages[{index}]: {problem}", index=index, param=f"messages[{index}]")


def check_messages(dialog: Dialog, *further_roles: str) -> None:
    """Raises InvalidDialog that names the index of the first message with another role than ROLES, or `further_roles`, or
    without a text."""
    for index, message in messages_of(dialog):
        if message.get("role") not in (*ROLES, *further_roles):
            raise invalid_message(index, f"role must be one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise invalid_message(index, "content must be a string")
        if not is_encodable(message["content"]):
            raise invalid_message(index, "content contains a lone surrogate, which is not a character")


def messages_of(dialog: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each message with its index. Raises InvalidDialog where `dialog` is not a list of objects, or has none."""
    if isinstance(dialog, str | Mapping) or not isinstance(dialog, Sequence):
        raise InvalidDialog("messages must be a list of messages")
    if not dialog:
        raise InvalidDialog("messages must have at least 1 message")
    for index, message in enumerate(dialog):
        if not isinstance(message, Mapping):
            raise invalid_message(index, "a message must be an object with role and content")
        yield index, message


class NoChatFormat(ChatFormat):
    """Of a model without one: every dialog is refused with the remedy. Completions work."""

    name = "none"
    is_quick = True
    template = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        pass

    def encode(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS, admit: Admit | None = None) -> list[int]:
        self.check(dialog)

    def check(self, dialog: Dialog) -> NoReturn:
        raise NoChatTemplate(
            "this model has no chat template, so it answers /v1/completions only; for chats, start the server with "
            "chat_template=FILE, or with chat_format=llama2 or chat_format=llama3",
            param="messages",
        )
