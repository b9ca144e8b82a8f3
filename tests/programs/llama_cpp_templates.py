"""Renders the published chat templates in llama-cpp-python's source distribution, and compares each with transformers.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    python -m tests.programs.llama_cpp_templates --sdist llama_cpp_python-0.3.36.tar.gz
    python -m tests.programs.llama_cpp_templates --folder FOLDER   # of .jinja files

Prints a line for each template: equal ids, both refuse, or what differs. Of a template that writes tools, a second line says
which tool format it has, and whether the calls that it writes into a prompt are read as calls. Ends with 1 if a template gives
other text.
"""

import argparse
import contextlib
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jinja2
from transformers import PreTrainedTokenizerFast

from deployments.http.merged_roles import encode_merging
from llama_core.errors import ConfigError, InvalidDialog
from llama_core.text.answer_format import AnswerFormat, open_answer_format
from llama_core.text.chat_format import ChatOptions, Message
from llama_core.text.registry import load_tokenizer
from llama_core.text.template.chat_template import TemplateChatFormat
from llama_core.text.tools.tool import Tool, ToolUse
from tests.llama_core.text.test_chat_template import DIALOGS, _Clock
from tests.support import vocabularies
from tests.support.tool_calls import read_calls

_FOLDER = "/vendor/llama.cpp/models/templates/"
_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def templates(sdist: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each template, in the order of their names."""
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda each: each.name):
            if _FOLDER in member.name and member.name.endswith(".jinja"):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name.rpartition("/")[2], content.read().decode()


def in_folder(folder: Path) -> Iterator[tuple[str, str]]:
    """As `templates`."""
    for file in sorted(folder.glob("*.jinja")):
        yield file.name, file.read_text()


def compare(source: str, folder: Path, theirs: Any) -> str:
    """How our ids and transformers' compare over all dialogs: equal, refused, or the first difference."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    try:
        ours = TemplateChatFormat(tokenizer, source, variables=_TOKENS)
    except ConfigError as error:
        return f"not served: {error.message}"
    counts: Counter[str] = Counter()
    for dialog in DIALOGS:
        for begins in (True, False):
            expected, found = None, None
            with contextlib.suppress(jinja2.TemplateError, TypeError, ValueError):
                expected = theirs.apply_chat_template(
                    dialog, chat_template=source, add_generation_prompt=begins, return_dict=False
                )
            try:
                found = ours.encode(dialog, ChatOptions(add_generation_prompt=begins))
            except InvalidDialog as error:
                if expected is not None:
                    return f"DIFFERENT: refused, not by transformers: {error.message}"
            if found != expected:
                return f"DIFFERENT on {dialog}: {found} {expected}"
            counts["both refuse" if found is None else "equal ids"] += 1
    return ", ".join(f"{count} {what}" for what, count in counts.items())


TOOL = Tool("get_weather", "The weather.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
QUESTION = "How is it there?"
CITIES = ("Rome", "Oslo")
OPTIONS = ChatOptions(tools=(TOOL,))


def tool_conversation(num_calls: int) -> list[Message]:
    """A question, so many calls in one message, and their results."""
    calls = [
        {"id": f"call{n:05}", "type": "function", "function": {"name": TOOL.name, "arguments": f'{{"city": "{city}"}}'}}
        for n, city in enumerate(CITIES[:num_calls])
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"} for call in calls]
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return cast(list[Message], [*messages, *results])


def with_tools(source: str, folder: Path) -> str:
    """The tool format that is found, and how conversations of one and of two calls go; "" if the template writes no tools."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    chat = TemplateChatFormat(tokenizer, source, variables=_TOKENS)
    if not chat.writes_tools:
        return ""
    answers = open_answer_format("auto", tokenizer, chat)
    found = [f"tools: {answers.tool_format.name}"]
    for num_calls in (1, 2):
        texts: list[str] = []

        def encode(messages: Sequence[Message], texts: list[str] = texts) -> list[int]:
            texts[:] = [chat.render(messages, OPTIONS)]
            return [0]

        try:
            encode_merging(tool_conversation(num_calls), encode)
        except InvalidDialog as error:
            found.append(f"{num_calls} refused: {error.message[:80]}")
            continue
        written = _behind_question(texts[0]).partition("result call00000")[0]
        num_read = max(_num_read(answers, written[at:]) for at in range(len(written)))
        found.append(f"{num_calls} written, " + (f"{num_read} read" if num_read else f"NOT READ: {written[:200]!r}"))
    return ", ".join(found)


def _behind_question(prompt: str) -> str:
    return prompt.rpartition(QUESTION)[2]


def _num_read(answers: AnswerFormat, text: str) -> int:
    """The calls that are read from the beginning of `text`, if they are those of the conversation."""
    reader = answers.reader(ToolUse((TOOL,)), begun=False)
    _, calls = read_calls([*reader.push(text), *reader.finish()])
    cities = tuple(arguments.get("city") for _, arguments in calls)
    return len(cities) if cities == CITIES[: len(cities)] else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source_of = parser.add_mutually_exclusive_group(required=True)
    source_of.add_argument("--sdist", type=Path, help="llama_cpp_python-0.3.36.tar.gz")
    source_of.add_argument("--folder", type=Path, help="of .jinja files")
    options = parser.parse_args()
    found = templates(options.sdist) if options.sdist else in_folder(options.folder)
    results: Counter[str] = Counter()
    clocks = ("transformers.utils.chat_template_utils.datetime", "llama_core.text.template.filters.datetime")
    with tempfile.TemporaryDirectory() as name, mock.patch(clocks[0], _Clock), mock.patch(clocks[1], _Clock):
        folder = Path(name)
        tokenizer, config = vocabularies.llama3()
        tokenizer.add_special_tokens(
            vocabularies.special("<|im_start|>", "<|im_end|>", "<｜User｜>", "<｜Assistant｜>")
        )
        vocabularies.write_folder(folder, tokenizer, config)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        for file, source in found:
            result = compare(source, folder, theirs)
            results[result.split(":")[0].split(" on ")[0] if result[0].isalpha() else "same as transformers"] += 1
            print(f"{file}: {result}", flush=True)
            if not result.startswith("not served") and (tools := with_tools(source, folder)):
                print(f"    {tools}", flush=True)
    print(dict(results))
    if results["DIFFERENT"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
