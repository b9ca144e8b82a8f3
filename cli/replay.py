"""`llama-ray replay`: sends a captured request again, and says where the tokens differ and what else does."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cli.capture import BadRequestFile, UnwritableFile, captured, read_object, write
from cli.capture_file import place_of_fault, printable
from cli.openai_http import ApiError, OpenAIHttp

FACTS: Final = ("model", "versions", "settings", "cpu")
SHOWN_CHARS: Final = 200  # of a text, around the first difference
Capture = Mapping[str, Any]


def run(file: Path, url: str, api_key: str | None, output: Path | None) -> int:
    """Returns 0 for the same tokens, 1 for others, or if the request failed, 2 for a file that is no capture."""
    try:
        old = read_capture(file)
        http = OpenAIHttp(url, api_key)
        body = {**old["body"], "seed": old["seed"]}
        if "model" in body:
            body["model"] = http.first_model()  # another server may serve the same files under another name
        new = captured(http, old["route"], body)
        if (place := place_of_fault(new)) is not None:
            raise ApiError(f"the server's capture is none that this version reads: {place} is missing or wrong")
        if output is not None:
            write(output, new)
    except (ApiError, BadRequestFile, UnwritableFile) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadRequestFile) else 1
    tokens, facts = list(token_differences(old, new)), list(fact_differences(old, new))
    print("\n".join(map(printable, [*(tokens or [_same(new)]), *facts])))
    return 1 if tokens else 0


def read_capture(file: Path) -> dict[str, Any]:
    """Raises BadRequestFile for what is no capture."""
    found = read_object(file)
    if (place := place_of_fault(found)) is not None:
        raise BadRequestFile(f"{file} is no capture that this version reads: {place} is missing or wrong")
    return found


def token_differences(old: Capture, new: Capture) -> Iterator[str]:
    """A line or several for each prompt and choice that differs. What was cut off is compared as far as it goes."""
    for number, (before, now) in enumerate(zip(old["prompts"], new["prompts"], strict=False)):
        if (at := first_difference(before, now)) is not None:
            yield f"prompt {number}: token {at} differs, {_token(before, at)} then and {_token(now, at)} now"
    if len(old["prompts"]) != len(new["prompts"]):
        yield f"{len(old['prompts'])} prompts then and {len(new['prompts'])} now"
    if len(old["choices"]) != len(new["choices"]):
        yield f"{len(old['choices'])} choices then and {len(new['choices'])} now"
    for number, (choice, again) in enumerate(zip(old["choices"], new["choices"], strict=False)):
        yield from _choice_differences(number, choice, again)


def _choice_differences(number: int, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, now = old["tokens"], new["tokens"]
    if old["finish_reason"] is None:
        now = now[: len(before)]
    elif new["finish_reason"] is None:
        yield f"choice {number}: complete then, cut off now"
    if (at := first_difference(before, now)) is not None:
        yield f"choice {number}: token {at} differs, {_token(before, at)} then and {_token(now, at)} now"
        yield f"  then: {_shown(old['text'], new['text'])}"
        yield f"  now:  {_shown(new['text'], old['text'])}"
    elif None not in (old["finish_reason"], new["finish_reason"]) and old["finish_reason"] != new["finish_reason"]:
        yield f"choice {number}: the same tokens, but {old['finish_reason']} then and {new['finish_reason']} now"


def fact_differences(old: Capture, new: Capture) -> Iterator[str]:
    """A line for each version, setting and so on that differs."""
    for group in FACTS:
        for name in {**old[group], **new[group]}:
            before, now = old[group].get(name, "absent"), new[group].get(name, "absent")
            if before != now:
                yield f"{group}.{name}: {before} then, {now} now"


def first_difference(before: Sequence[int], now: Sequence[int]) -> int | None:
    """The first position at which two lists differ, or one of them ends; None for equal lists."""
    at = next((i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), None)
    return min(len(before), len(now)) if at is None and len(before) != len(now) else at


def _token(tokens: Sequence[int], at: int) -> str:
    return str(tokens[at]) if at < len(tokens) else "the end"


def _shown(text: str, other: str) -> str:
    """The text around the first character that differs from the other."""
    at = next((i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), len(text))
    begin = max(0, at - SHOWN_CHARS // 2)
    part = text[begin : begin + SHOWN_CHARS]
    return repr(("..." if begin else "") + part + ("..." if begin + SHOWN_CHARS < len(text) else ""))


def _same(new: Capture) -> str:
    num_tokens = sum(len(choice["tokens"]) for choice in new["choices"])
    num_choices = len(new["choices"])
    return f"the same {num_tokens} tokens" + (f" in {num_choices} choices" if num_choices > 1 else "")
