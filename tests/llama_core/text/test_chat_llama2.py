"""Prompts equal the reference's ids; malformed dialogs and dialogs with the template's tags are refused."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import InvalidDialog, SpecialTags
from llama_core.text.chat_format import SAFE_RESPONSE
from llama_core.text.chat_llama2 import SPECIAL_TAGS, Llama2ChatFormat
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizer import Tokenizer

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


def test_the_golden_dialogs_cover_both_answers() -> None:
    assert {answer == SAFE_RESPONSE for _, _, answer in CASES} == {True, False}


def test_a_leading_system_message_folds_into_the_first_user_turn_only() -> None:
    read = TOKENIZER.decode(CHAT.encode(dialog_of("s: S ", "u: a ", "a: b ", "u: c ")))
    assert read == "[INST] <<SYS>>\n S \n<</SYS>>\n\n a [/INST] b  [INST] c [/INST]"


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


@pytest.mark.parametrize("dialog", [[], "user", {"role": "user", "content": "x"}, None, 3])
def test_anything_but_a_list_of_messages_is_refused(dialog: Any) -> None:
    with pytest.raises(InvalidDialog) as caught:
        CHAT.check(dialog)
    assert caught.value.index is None


def test_empty_contents_are_legal_as_in_the_reference() -> None:
    assert TOKENIZER.decode(CHAT.encode(dialog_of("u:"))) == "[INST]  [/INST]"


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


def test_a_tag_in_the_rendered_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama2ChatFormat, "check_special_tags", lambda *_: None)
    for tag in SPECIAL_TAGS:
        with pytest.raises(SpecialTags) as caught:
            CHAT.encode(dialog_of("u:fine", "a:fine", f"u:x{tag}"))
        assert caught.value.index == 2


@pytest.mark.parametrize(
    "content",
    ["</s>", "<s>", "a</s><s>b", "<unk>", "<0x02>", "[inst]", "[ INST ]", "[INST", "INST]", "<<SYS", "SYS>>", "\x00"],
)
def test_text_that_resembles_a_tag_is_plain_text(content: str) -> None:
    ids = CHAT.encode(dialog_of("u:" + content))
    assert [i for i in ids if TOKENIZER.is_control(i)] == [TOKENIZER.bos_id] == ids[:1]
    assert TOKENIZER.decode(ids) == f"[INST] {content} [/INST]"


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


@pytest.mark.parametrize(
    "content",
    [
        "\uff3bINST\uff3d",  # full-width brackets
        "\uff3b\uff0fINST\uff3d",
        "[IN\x01ST]",  # a control character, which this rule deletes
        "\uff1c\uff1cSYS\uff1e\uff1e",
    ],
)
def test_a_tag_that_only_appears_after_encoding_is_refused(content: str, tmp_path: Path) -> None:
    tokenizer = train_rewriting_tokenizer(tmp_path, "nmt_nfkc")
    assert not any(tag in content for tag in SPECIAL_TAGS)
    with pytest.raises(SpecialTags) as caught:
        Llama2ChatFormat(tokenizer).encode(dialog_of("s:fine", "u:" + content, "a:fine", "u:fine"))
    assert caught.value.index == 1


def test_a_tokenizer_that_folds_case_still_serves_chats(tmp_path: Path) -> None:
    tokenizer = train_rewriting_tokenizer(tmp_path, "nmt_nfkc_cf")
    assert tokenizer.decode(Llama2ChatFormat(tokenizer).encode(dialog_of("u:Hi"))).startswith("[inst] hi")
    with pytest.raises(SpecialTags):
        Llama2ChatFormat(tokenizer).encode(dialog_of("u:[iNsT]"))


def test_min_tokens_bounds_a_long_dialog_without_encoding() -> None:
    assert CHAT.min_tokens(dialog_of("u:" + "a" * 10_000_000)) > 500_000
    assert CHAT.min_tokens(dialog_of("u:" + " " * 10_000_000)) < 10


def train_rewriting_tokenizer(folder: Path, rule: str) -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat [INST] <<SYS>> [/INST]"] * 20),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        vocab_size=330,
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return load_tokenizer(path)
