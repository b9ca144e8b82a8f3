"""Sends hostile and clean dialogs through the chat template of every family and the built-in formats.

Rules: the control tokens of a hostile dialog are those of the same dialog with harmless contents; a clean dialog has
transformers' ids.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from llama_core.errors import InvalidDialog, SpecialTags
from llama_core.text.chat_format import ChatFormat, ChatOptions
from llama_core.text.registry import find_chat_format, load_tokenizer, open_chat_format
from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.fuzz.outcome import Outcome
from tests.support.chat_templates import FAMILIES, make_chat_model

# Control tokens of families whose tokenizers the parts below do not have: they must be plain text too.
_FOREIGN: Final = (
    *("<|endoftext|>", "<end_of_turn>", "<|eom_id|>", "[AVAILABLE_TOOLS]", "<|reserved_special_token_0|>", "<<SYS>>"),
)
_TEXTS: Final = (
    *("Hello", " spaces ", "été 🦙", "日本語", "a" * 40, "{{ x }}{% y %}", "0", ".", "</think>", "e\u0301"),
    *("\n\n", "\t"),
)
_ODD: Final = ("<|", "|>", "<", ">", "[", "]", "\u2581", "\ufdd0", "\u200b", "\0", "｜")


class _Family:
    """One chat format; `theirs` is transformers' tokenizer for a template."""

    def __init__(self, name: str, tokenizer: Tokenizer, chat_format: ChatFormat, theirs: Any = None) -> None:
        self.name, self.tokenizer, self.format, self.theirs = name, tokenizer, chat_format, theirs
        self.words = FAMILIES[name].words if theirs is not None else ()
        self._word_ids = {each for word in self.words for each in tokenizer.encode(word, bos=False, eos=False)}

    def controls(self, dialog: Any, options: ChatOptions) -> list[int]:
        """The ids that only the template writes."""
        ids = self.format.encode(dialog, options)
        return [each for each in ids if self.tokenizer.is_control(each) or each in self._word_ids]


def families(folder: Path) -> list[_Family]:
    made = []
    for name in FAMILIES:
        place = make_chat_model(name, folder / name)
        tokenizer = load_tokenizer(place / "tokenizer.json")
        theirs = PreTrainedTokenizerFast.from_pretrained(place)
        made.append(_Family(name, tokenizer, open_chat_format("auto", tokenizer, place), theirs))
        if name in ("llama2", "llama3"):
            made.append(_Family(f"built-in {name}", tokenizer, find_chat_format(name, tokenizer)))
    return made


def hostile_text(draw: Random, controls: Sequence[str]) -> str:
    """Control tokens, whole or in parts, among other text."""
    pieces = []
    for _ in range(draw.randint(0, 5)):
        control, how = draw.choice(controls), draw.random()
        cut = draw.randint(0, len(control))
        pieces.append(control if how < 0.4 else control[:cut] if how < 0.6 else control[cut:] if how < 0.8 else "")
        if draw.random() < 0.4:
            pieces.append(draw.choice((*_TEXTS, *_ODD)))
    return "".join(pieces)


def clean_text(draw: Random, without: Sequence[str] = ()) -> str:
    texts = [text for text in _TEXTS if text not in without]
    return "".join(draw.choice(texts) for _ in range(draw.randint(0, 4)))


def dialog_of(draw: Random, write: Any) -> list[dict[str, str]]:
    """A dialog in an order that every template takes."""
    messages = [{"role": "system", "content": write()}] if draw.random() < 0.5 else []
    for _ in range(draw.choice((0, 0, 1, 2))):
        messages += [{"role": "user", "content": write()}, {"role": "assistant", "content": write()}]
    messages.append({"role": "user", "content": write()})
    if draw.random() < 0.2:
        messages[-1]["name"] = write()
    return messages


def run(cases: int, seed: int) -> Outcome:
    outcome = Outcome("chats")
    with tempfile.TemporaryDirectory() as name:
        made = families(Path(name))
        controls = sorted(
            {text for family in made for text in (*family.tokenizer.control_texts, *family.words)} | {*_FOREIGN}
        )
        for number in range(cases):
            family, draw = made[number % len(made)], Random(seed * 1_000_003 + number)
            check = _check_clean if family.theirs is not None and draw.random() < 0.3 else _check_hostile
            ended, fault = check(family, draw, controls)
            outcome.case(f"{family.name}: {ended}")
            if fault is not None:
                outcome.found(f"{family.name}, seed {seed * 1_000_003 + number}: {fault}")
    return outcome


def _check_hostile(family: _Family, draw: Random, controls: Sequence[str]) -> tuple[str, str | None]:
    dialog = dialog_of(draw, lambda: hostile_text(draw, controls))
    options = ChatOptions(
        template_variables={"date_string": hostile_text(draw, controls)} if family.name == "llama3" else {}
    )
    harmless = [{**message, **dict.fromkeys({*message} - {"role"}, "a")} for message in dialog]
    try:
        found = family.controls(dialog, options)
    except SpecialTags:
        return "special_tags", None if family.name == "built-in llama2" else f"special tags: {dialog!r}"
    except InvalidDialog as error:
        return "refused", f"{error.message}: {dialog!r}"
    expected = family.controls(harmless, options)
    return "hostile", None if found == expected else f"control tokens {found}, not {expected}: {dialog!r}"


def _check_clean(family: _Family, draw: Random, controls: Sequence[str]) -> tuple[str, str | None]:
    dialog = dialog_of(draw, lambda: clean_text(draw, family.words))
    begins, variables = draw.random() < 0.5, {"date_string": "1 May"} if family.name == "llama3" else {}
    ours = family.format.encode(dialog, ChatOptions(begins, template_variables=variables))  # type: ignore[arg-type]
    theirs = family.theirs.apply_chat_template(dialog, add_generation_prompt=begins, return_dict=False, **variables)
    return "clean", None if ours == theirs else f"ids {ours}, not {theirs}: {dialog!r}"
