"""Chat templates are found beside the weights, in GGUF files and in the argument; damaged files are refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_core.errors import ConfigError, InvalidDialog, LlamaError, NoChatTemplate, TokenizerError
from llama_core.text.registry import load_tokenizer, open_chat_format
from llama_core.text.template.chat_template import TemplateChatFormat
from llama_core.text.template.files import find_template, given_template
from tests.conftest import GOLDEN
from tests.support.gguf_models import write_gguf

TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
HELLO: Any = [{"role": "user", "content": "Hello"}]


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def found(folder: Path) -> str | None:
    template = find_template(folder)
    return None if template is None else template.source


def test_the_nearest_file_with_a_template_is_taken(tmp_path: Path) -> None:
    assert find_template(tmp_path) is None
    write(tmp_path, "chat_template.json", chat_template="third")
    assert found(tmp_path) == "third"
    write(tmp_path, "tokenizer_config.json", chat_template=None)
    assert found(tmp_path) == "third"
    write(tmp_path, "tokenizer_config.json", chat_template="second")
    assert found(tmp_path) == "second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert found(tmp_path) == "first"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    write(tmp_path, "tokenizer_config.json", chat_template=named)
    assert found(tmp_path) == "chat"
    write(tmp_path, "tokenizer_config.json", chat_template=named[:1])
    assert found(tmp_path) == "tools"


@pytest.mark.parametrize(
    "value",
    [3, [3], [{}], {"a": 1}, [{"name": [], "template": "x"}], [{"name": {}, "template": "x"}],
     [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]],
)  # fmt: skip
def test_a_field_that_is_no_template_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", chat_template=value)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template"):
        find_template(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a" * 2**21, b""])
def test_a_template_file_that_cannot_be_read_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(LlamaError, match=r"chat_template\.jinja"):
        open_chat_format("auto", TOKENIZER, tmp_path)


def test_a_template_knows_the_special_tokens_of_the_models_files(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ pad_token }}{{ sep_token is defined }}{{ messages[0].content }}"
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<unk>", "sep_token": None}
    write(tmp_path, "tokenizer_config.json", **tokens, chat_template=source)
    chat = open_chat_format("auto", TOKENIZER, tmp_path)
    assert isinstance(chat, TemplateChatFormat) and chat.render(HELLO) == "<s><unk>FalseHello"


def test_the_argument_is_a_path_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}")
    assert given_template(str(path)).source == given_template(path.read_text()).source
    chat = open_chat_format("auto", TOKENIZER, GOLDEN / "mp1", str(path))
    assert chat.encode(HELLO) == TOKENIZER.encode("Hello", bos=False, eos=False)
    with pytest.raises(ConfigError, match=r"chat_template: chat template .*absent\.jinja does not exist") as caught:
        given_template(str(tmp_path / "absent.jinja"))
    assert caught.value.param == "chat_template"
    for wrong in ("~nosuchuser/x", "a\0b"):
        with pytest.raises(ConfigError, match=r"^chat_template: ") as caught:
            given_template(wrong)
        assert caught.value.param == "chat_template"
    with pytest.raises(ConfigError, match="contradicts chat_format llama2"):
        open_chat_format("llama2", TOKENIZER, GOLDEN / "mp1", str(path))


def test_metas_folders_have_the_format_of_their_tokenizer_and_others_none(tmp_path: Path) -> None:
    assert open_chat_format("auto", TOKENIZER, GOLDEN / "mp1").name == "llama2"
    with pytest.raises(ConfigError, match="has no chat template"):
        open_chat_format("template", TOKENIZER, tmp_path)
    with pytest.raises(ConfigError, match=r"llama3 needs a tokenizer with <\|begin_of_text\|>"):
        open_chat_format("llama3", TOKENIZER, tmp_path)
    none = open_chat_format("auto", TOKENIZER, tmp_path)
    with pytest.raises(NoChatTemplate, match="chat_template=FILE"):
        none.encode(HELLO)


def test_the_template_of_a_gguf_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    source = "{{ bos_token }}{{ messages[0].content }}"
    write_gguf(path, "llama", {"tokenizer.chat_template": source}, {"norm": np.zeros(32, np.float32)})
    template = find_template(path)
    assert template is not None and template == find_template(tmp_path)
    chat = open_chat_format("auto", TOKENIZER, path)
    assert chat.encode(HELLO)[0] == TOKENIZER.bos_id
    with pytest.raises(InvalidDialog):
        chat.encode([])
