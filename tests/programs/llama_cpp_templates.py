"""Renders the published chat templates in llama-cpp-python's source distribution, and compares each with transformers.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    python -m tests.programs.llama_cpp_templates --sdist llama_cpp_python-0.3.36.tar.gz

Prints a line for each template: equal ids, both refuse, or what differs. Ends with 1 if a template gives other text.
"""

import argparse
import contextlib
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2
from transformers import PreTrainedTokenizerFast

from llama_core.errors import ConfigError, InvalidDialog
from llama_core.text.chat_format import ChatOptions
from llama_core.text.registry import load_tokenizer
from llama_core.text.template.chat_template import TemplateChatFormat
from tests.llama_core.text.test_chat_template import DIALOGS, _Clock
from tests.support import vocabularies

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sdist", type=Path, required=True, help="llama_cpp_python-0.3.36.tar.gz")
    options = parser.parse_args()
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
        for file, source in templates(options.sdist):
            result = compare(source, folder, theirs)
            results[result.split(":")[0].split(" on ")[0] if result[0].isalpha() else "same as transformers"] += 1
            print(f"{file}: {result}", flush=True)
    print(dict(results))
    if results["DIFFERENT"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
