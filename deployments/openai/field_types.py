"""The types of fields that several bodies share, with the bounds of their values.

Each validator answers a bad value with one error that says what is valid. Knows nothing of any one body.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from deployments.openai.errors import Unsupported
from llama_core.errors import InvalidParameter
from llama_core.scheduling.request import BACKGROUND
from llama_core.scheduling.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIASES

MAX_PRIORITY = BACKGROUND
MAX_OWNER_CHARS = 64
MAX_CHOICES = 128  # prompts * n of one request
MAX_INPUTS = 2048  # of one request for embeddings, as OpenAI has it
MAX_STOPS = 16  # each costs a comparison for every character of the answer
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_TOKENS = 2**31 - 1
NO_LIMIT = -1  # as llama.cpp's clients send it
MAX_NAME_CHARS = 256
MAX_BAD_WORD_CHARS = 64
MAX_TEMPLATE_VARIABLES = 16
MAX_VARIABLE_CHARS = 4096
NOT_TEXT = "[an image or a file, which this model cannot read]"
ONLY_TEXT = "this model reads text only, no image and no file"
TEXT_PARTS = ["text", "refusal"]
MAX_TEXT_BYTES = 2**20  # of a text to tokenize, in UTF-8: each may become a token

User = Annotated[str | None, AfterValidator(lambda name: name and name[:MAX_OWNER_CHARS])]
TextPrompts = list[str]
IdPrompts = list[list[int]]


def integer(value: object) -> object:
    """A number without a fraction as an int, as JSON Schema counts 2.0; another value as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def _ids(value: list[Any]) -> list[int] | None:
    """A list of ids with at least one; None for another list."""
    kinds = set(map(type, value))  # the fastest check of thousands of ids; excludes bool
    if kinds == {int}:
        return value
    if not kinds or not kinds <= {int, float}:
        return None
    ids = [number for item in value if type(number := integer(item)) is int]
    return ids if len(ids) == len(value) else None


def _integers(value: object, validate: ValidatorFunctionWrapHandler) -> list[int]:
    """Looks for numbers such as 2.0 only in a list that is refused, because they are rare."""
    try:
        valid: list[int] = validate(value)
    except ValidationError:
        if not isinstance(value, list) or float not in map(type, value):
            raise
        valid = validate([integer(item) for item in value])
    return valid


def _prompts(value: object, most: int = MAX_CHOICES) -> TextPrompts | IdPrompts:
    """A string, a list of strings, a list of ids or a list of id lists, as a list of prompts of one kind.

    A validator of our own: pydantic reports an error for each item of each type of a union, 400,000 for one bad body.
    """
    kinds = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidParameter(kinds)
    if not value:
        raise InvalidParameter("must not be an empty list")
    if (ids := _ids(value)) is not None:
        return [ids]
    if len(value) > most:
        raise InvalidParameter(f"must have at most {most} items")
    if all(isinstance(item, str) for item in value):
        return value
    prompts = [ids for item in value if isinstance(item, list) and (ids := _ids(item)) is not None]
    if len(prompts) < len(value):
        raise InvalidParameter(kinds + ", none of them empty")
    return prompts


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidParameter("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidParameter(f"must have at most {MAX_STOPS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidParameter(f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def joined_texts(value: object, types: Collection[str]) -> str:
    """A text, or a list of parts of these types, joined by newlines as other servers do. A refusal has its text under its own
    name."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_CONTENT_PARTS:
        raise InvalidParameter(f"must be a string or a list of at most {MAX_CONTENT_PARTS} text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise InvalidParameter(f"[{index}]: must be an object with a type")
        if kind not in types:
            raise Unsupported(f"[{index}].type: {ONLY_TEXT}")
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(text := part.get(name), str):
            raise InvalidParameter(f"[{index}].{name}: must be a string")
        texts.append(text)
    return "\n".join(texts)


def only_text(parts: object, text_types: Collection[str]) -> object:
    """The parts of a tool's result. A part of another type becomes its `text`, or NOT_TEXT: agents send screenshots, and send
    them again with every later turn."""
    if not isinstance(parts, list):
        return parts
    return [_as_text(part, lambda kind: kind not in text_types) for part in parts]


def with_earlier_as_text(messages: Any, is_replaced: Callable[[str], bool]) -> Any:
    """The messages, or items. Of those before the last answer, parts of some types become texts: clients send the images of
    earlier turns again with every later one."""
    if not isinstance(messages, list):
        return messages
    answers = [index for index, each in enumerate(messages) if isinstance(each, dict) and _is_answer(each)]
    earlier = [
        {**each, "content": [_as_text(part, is_replaced) for part in each["content"]]}
        if isinstance(each, dict) and isinstance(each.get("content"), list)
        else each
        for each in messages[: answers[-1] if answers else 0]
    ]
    return earlier + messages[len(earlier) :]


def _is_answer(item: dict[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") == "function_call"


def _as_text(part: object, is_replaced: Callable[[str], bool]) -> object:
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str) or not is_replaced(kind):
        return part
    text = text_of(part)
    return {"type": "text", "text": NOT_TEXT if text is None else text}


def text_of(part: dict[str, Any]) -> str | None:
    """The text of a part of another type, such as Anthropic's text documents; None where it has none."""
    source = part.get("source")
    text = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else part.get("text")
    return text if isinstance(text, str) else None


def _logit_bias(value: object) -> dict[int, float]:
    """Token id -> bias. Checks the keys only, of which `SamplingParams` knows nothing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidParameter("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidParameter(f"must have at most {MAX_LOGIT_BIASES} token ids")
    if not all(key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 20 for key in value):
        raise InvalidParameter("its keys must be token ids")
    biases = {int(key): bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise InvalidParameter("its keys must be different token ids; 1 and 01 are the same")
    return biases


def bad_words_of(value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS // 3:  # each in up to three spellings
        raise InvalidParameter(f"must be a list of at most {MAX_BAD_WORDS // 3} strings")
    if not all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS for word in value):
        raise InvalidParameter(f"each must be a string of 1 to {MAX_BAD_WORD_CHARS} characters")
    return value


def _template_variables(value: object) -> dict[str, object]:
    """Name -> string, number, bool or null. The chat format checks the names."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_VARIABLES:
        raise InvalidParameter(f"must be an object of at most {MAX_TEMPLATE_VARIABLES} variables")
    for item in value.values():
        if not (item is None or isinstance(item, bool | int | float | str)):
            raise InvalidParameter("its values must be strings, numbers, true, false or null")
        if isinstance(item, str) and len(item) > MAX_VARIABLE_CHARS:
            raise InvalidParameter(f"its strings may have {MAX_VARIABLE_CHARS} characters at most")
    return value


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": TEXT_PARTS}, "text": {"type": "string"}, "refusal": {"type": "string"}},
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}

Prompt = Annotated[
    TextPrompts | IdPrompts, PlainValidator(_prompts, json_schema_input_type=str | list[str | int | list[int]])
]
Inputs = Annotated[
    TextPrompts | IdPrompts,
    PlainValidator(partial(_prompts, most=MAX_INPUTS), json_schema_input_type=str | list[str | int | list[int]]),
]
Stop = Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[str])]
Content = Annotated[str, PlainValidator(lambda value: joined_texts(value, TEXT_PARTS)), WithJsonSchema(_CONTENT_SCHEMA)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias), WithJsonSchema({"type": "object"})]
BadWords = Annotated[list[str], PlainValidator(bad_words_of, json_schema_input_type=list[str])]
TemplateVariables = Annotated[dict[str, Any], PlainValidator(_template_variables), WithJsonSchema({"type": "object"})]
Ids = Annotated[list[int], FailFast(), WrapValidator(_integers)]
Integer = Annotated[int, BeforeValidator(integer)]
OptionalInteger = Annotated[int | None, BeforeValidator(integer)]
Flag = bool | None


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


class BodyWithUnknownFields(Body):
    """Keeps the fields that the schema does not name: `unsupported.py` looks for OpenAI's and vLLM's among them."""

    model_config = ConfigDict(extra="allow")

    def given(self, names: Collection[str]) -> dict[str, object]:
        """Every field that the client sent, validated where the schema names it; nothing if it sent none of `names`. Sorted, so
        that all replicas refuse the same one of several."""
        given = () if self.model_fields_set.isdisjoint(names) else sorted(self.model_fields_set)
        return {name: getattr(self, name) for name in given}
