"""Clients that render the published template of a built-in format get the ids that the server makes."""

import jinja2
from hypothesis import given
from hypothesis import strategies as st

from llama_core.text.chat_format import ChatFormat, Message
from llama_core.text.registry import find_chat_format, load_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.conftest import GOLDEN

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
