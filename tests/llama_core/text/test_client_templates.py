"""Clients that render the published templates of the built-in formats get the ids that the server makes."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.text.chat_format import ChatFormat, ChatOptions, Message, Role
from llama_core.text.registry import find_chat_format, load_tokenizer
from llama_core.text.tokenizer import Tokenizer
from tests.conftest import GOLDEN
from tests.support.chat_templates import make_chat_model

LLAMA2 = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")


def rendered(tokenizer: Tokenizer, chat_format: ChatFormat, dialog: list[Message], begins: bool = True) -> list[int]:
    """As clients do: text from the template, then ids by `/tokenize` with parse_special."""
    assert chat_format.client_template is not None and tokenizer.bos_id is not None
    text = jinja2.Template(chat_format.client_template).render(
        messages=dialog,
        bos_token=tokenizer.token_name(tokenizer.bos_id),
        eos_token=tokenizer.token_name(tokenizer.eos_id),
        add_generation_prompt=begins,
    )
    return tokenizer.encode_special(text, bos=False)


words = st.text(alphabet="ab é\n🙂.", max_size=12)


@given(st.none() | words, st.lists(st.tuples(words, words), max_size=3), words)
def test_the_template_of_llama2_gives_the_servers_ids(
    system: str | None, rounds: list[tuple[str, str]], last: str
) -> None:
    dialog: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in rounds:
        dialog += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    dialog.append({"role": "user", "content": last})
    chat_format = find_chat_format("llama2", LLAMA2)
    assert rendered(LLAMA2, chat_format, dialog) == chat_format.encode(dialog)


def test_the_template_of_llama2_refuses_what_the_format_refuses() -> None:
    chat_format = find_chat_format("llama2", LLAMA2)
    with pytest.raises(jinja2.exceptions.UndefinedError, match="raise_exception"):
        rendered(LLAMA2, chat_format, [{"role": "assistant", "content": "Hi"}])


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_chat_model("llama3", tmp_path_factory.mktemp("llama3")) / "tokenizer.json")


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize(
    "contents",
    [("Hello",), ("Be kind. ", " Hi\n\n", "Hello!"), ("", "\n a\n\nb é🙂 ", "1 2  3", "."), (" ", "", "x\n")],
)
def test_the_template_of_llama3_gives_the_servers_ids(
    llama3: Tokenizer, contents: tuple[str, ...], begins: bool
) -> None:
    chat_format = find_chat_format("llama3", llama3)
    roles: tuple[Role, ...] = ("system", "user", "assistant", "user")
    dialog: list[Message] = [
        {"role": role, "content": text} for role, text in zip(roles[-len(contents) :], contents, strict=True)
    ]
    expected = chat_format.encode(dialog, ChatOptions(add_generation_prompt=begins))
    assert rendered(llama3, chat_format, dialog, begins) == expected
