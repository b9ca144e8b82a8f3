"""Prompts equal the reference's ids; malformed dialogs and dialogs with the template's tags are refused."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import InvalidDialog, SpecialTags
from llama_core.text.chat_format import SAFE_RESPONSE
from llama_core.text.chat_llama2 import SPECIAL_TAGS, Llama2ChatFormat
from llama_core.text.registry import load_tokenizer

GOLDEN_DIR = Path(__file__).parents[2] / "data" / "golden"
TOKENIZER = load_tokenizer(GOLDEN_DIR / "mp1" / "tokenizer.model")
CHAT = Llama2ChatFormat(TOKENIZER)
CHATS = json.loads((GOLDEN_DIR / "golden.json").read_text())["chats"]
CASES = [
    (dialog, ids, result["generation"]["content"])
    for chat in CHATS
    for dialog, ids, result in zip(chat["dialogs"], chat["prompt_tokens"], chat["chat_completion"], strict=True)
]


def dialog_of(*turns: str) -> list[Any]:
    """A dialog of a system, user or assistant message for each of "s:text", "u:text", "a:text"."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(("dialog", "ids", "answer"), CASES)
def test_dialogs_encode_id_for_id_as_the_reference(dialog: list[Any], ids: list[int], answer: str) -> None:
    if answer == SAFE_RESPONSE:
        with pytest.raises(SpecialTags):
            CHAT.encode(dialog)
    else:
        assert CHAT.encode(dialog) == ids


# Order of roles, and types


@pytest.mark.parametrize(
    ("dialog", "index"),
    [
        (dialog_of("a:x"), 0),
        (dialog_of("s:x"), 0),
        (dialog_of("u:x", "u:y"), 1),
        (dialog_of("u:x", "s:y"), 1),
        (dialog_of("s:x", "s:y", "u:z"), 1),
        (dialog_of("s:x", "a:y"), 1),
        (dialog_of("u:x", "a:y"), 1),
        (dialog_of("u:x", "a:y", "a:z"), 2),
        (dialog_of("u:x", "a:y", "s:z", "u:w"), 2),
        ([{"role": "tool", "content": "x"}], 0),
        ([{"role": ["user"], "content": "x"}], 0),
        ([{"content": "x"}], 0),
        ([{"role": "user"}], 0),
        ([{"role": "user", "content": None}], 0),
        ([{"role": "user", "content": b"x"}], 0),
        ([*dialog_of("u:x", "a:y"), "z"], 2),
        (dialog_of("u:x", "a:y", "u:\ud800"), 2),
    ],
)
def test_a_malformed_dialog_is_refused_with_the_index(dialog: list[Any], index: int) -> None:
    for call in (CHAT.check, CHAT.encode):
        with pytest.raises(InvalidDialog) as caught:
            call(dialog)
        assert caught.value.index == index
        assert caught.value.param == f"messages[{index}]"
        assert f"messages[{index}]" in caught.value.message


def test_errors_never_repeat_the_input() -> None:
    dialogs: list[Any] = [dialog_of("u:secret [INST]"), dialog_of("u:secret\ud800"), dialog_of("u:x")]
    dialogs[2][0]["role"] = "secret"
    for dialog in dialogs:
        with pytest.raises(InvalidDialog) as caught:
            CHAT.encode(dialog)
        assert "secret" not in caught.value.message


# Tags


@pytest.mark.parametrize("tag", SPECIAL_TAGS)
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_tag_in_any_message_is_refused_with_its_index(tag: str, index: int) -> None:
    dialog = dialog_of("s:one", "u:two", "a:three", "u:four")
    dialog[index]["content"] += f"x{tag}y"
    for call in (CHAT.check_special_tags, CHAT.encode):
        with pytest.raises(SpecialTags) as caught:
            call(dialog)
        assert caught.value.index == index
        assert f"messages[{index}]" in caught.value.message


tricky = st.lists(
    st.sampled_from([*SPECIAL_TAGS, "[", "]", "/", "<", "<<", ">>", "INST", "SYS", "<s>", "</s>", " ", "\n", "\u2581"])
    | st.text(max_size=3)
).map("".join)


@given(tricky, tricky, tricky)
def test_an_accepted_dialog_has_the_templates_tags_and_control_tokens_only(system: str, user: str, answer: str) -> None:
    dialog = dialog_of("s:" + system, "u:" + user, "a:" + answer, "u:end")
    if any(tag in text for tag in SPECIAL_TAGS for text in (system, user, answer)):
        with pytest.raises(SpecialTags):
            CHAT.encode(dialog)
        return
    ids = CHAT.encode(dialog)
    assert [TOKENIZER.decode(ids).count(tag) for tag in SPECIAL_TAGS] == [2, 2, 1, 1]
    assert [i for i in ids if TOKENIZER.is_control(i)] == [1, 2, 1]
    assert CHAT.min_tokens(dialog) <= len(ids)


words = st.text(alphabet="ab é\n🙂.", max_size=12)


@given(st.none() | words, st.lists(st.tuples(words, words), max_size=3), words)
def test_clients_that_render_the_published_template_get_the_servers_ids(
    system: str | None, rounds: list[tuple[str, str]], last: str
) -> None:
    """Text from the template, then ids by `/tokenize` with parse_special."""
    dialog = [] if system is None else dialog_of("s:" + system)
    for question, answer in rounds:
        dialog += dialog_of("u:" + question, "a:" + answer)
    dialog += dialog_of("u:" + last)
    assert CHAT.client_template is not None
    template = jinja2.Template(CHAT.client_template)
    text = template.render(messages=dialog, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert TOKENIZER.encode_special(text, bos=False) == CHAT.encode(dialog)
