"""Finds the tokenizer of a file or folder, and the chat format with a name. Each implementation is one line in a table here."""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

from llama_core.errors import ConfigError, TokenizerError
from llama_core.files.text_files import fault_of
from llama_core.text.chat_format import ChatFormat, NoChatFormat
from llama_core.text.chat_llama3 import HEADER_START
from llama_core.text.template.files import find_template, given_template
from llama_core.text.tokenizers.files import SIDE_FILES
from llama_core.text.tokenizers.probe import probe_tokenizer
from llama_core.text.tokenizers.tokenizer import Tokenizer

# Name -> class, imported on first use. The first whose `recognizes` says so, by the file's name or first bytes, loads it; the
# last recognizes every file, so that its error describes a file of unknown kind.
TOKENIZERS: Final[Mapping[str, str]] = {
    "hugging_face": "llama_core.text.tokenizers.hugging_face_tokenizer:HuggingFaceTokenizer",
    "tiktoken": "llama_core.text.tokenizers.tiktoken_tokenizer:TiktokenTokenizer",
    "gguf": "llama_core.text.tokenizers.gguf_tokenizer:GGUF",
    "sentencepiece": "llama_core.text.tokenizers.sentencepiece_tokenizer:SentencePieceTokenizer",
}
CHAT_FORMATS: Final[Mapping[str, str]] = {
    "llama2": "llama_core.text.chat_llama2:Llama2ChatFormat",
    "llama3": "llama_core.text.chat_llama3:Llama3ChatFormat",
}
AUTO, TEMPLATE = "auto", "template"
DEFAULT_CHAT_FORMAT: Final = AUTO
_LEAST_SHARE_OF_ROWS: Final = 0.9  # published models pad their embeddings by less than a tenth
CHAT_FORMAT_NAMES: Final = (AUTO, TEMPLATE, *CHAT_FORMATS)


def load_tokenizer(path: str | Path, num_rows: int | None = None, *, probes: bool = True) -> Tokenizer:
    """The tokenizer at `path`: a file, or a folder as in `find_tokenizer`. Raises TokenizerError that names the file.

    num_rows: of the model's embedding, None if unknown. Added tokens past it are left out, with a warning, unless one is BOS or
    EOS. Where an ordinary token lies past it, all are kept: the tokenizer belongs to another model. probes: loads a
    tokenizer.json in a process of its own first, see `probe_tokenizer`.
    """
    file = find_tokenizer(path)
    if Path(path).is_dir() and not file.exists():
        raise TokenizerError(
            f"{path} has no tokenizer: neither tokenizer.json, tokenizer.model nor a .gguf file exists in it"
        )
    if fault := fault_of(file):
        raise TokenizerError(f"{file}: {fault}")
    if probes and file.suffix == ".json":
        probe_tokenizer(file, num_rows)
    kinds = map(resolve_name, TOKENIZERS.values())
    tokenizer: Tokenizer = next(each for each in kinds if each.recognizes(file))(file, num_rows)
    return tokenizer


def check_vocabulary(tokenizer: Path, num_tokens: int, checkpoint: str | Path, num_rows: int) -> None:
    """Raises ConfigError for a tokenizer that does not lie beside the weights and has far fewer tokens than the model has rows:
    it belongs to another model."""
    if num_tokens < _LEAST_SHARE_OF_ROWS * num_rows and tokenizer != find_tokenizer(checkpoint):
        raise ConfigError(
            f"{tokenizer}: has {num_tokens:,} tokens, but {checkpoint} has {num_rows:,} rows: tokenizer and checkpoint belong "
            "to different models. Set tokenizer_path to the tokenizer of the model, or leave it out where that lies beside the "
            "weights",
            param="tokenizer_path",
        )


def find_tokenizer(path: str | Path) -> Path:
    """The tokenizer's main file. In a folder, that is tokenizer.json, tokenizer.model, or the first .gguf file.

    In a folder in Meta's format, tokenizer.model comes first. Without any of them, tokenizer.model, which does not exist.
    """
    folder = Path(path)
    if not folder.is_dir():
        return folder
    names = ["tokenizer.json", "tokenizer.model"]
    if (folder / "params.json").exists():
        names.reverse()
    found = [folder / name for name in names if (folder / name).is_file()]
    return next(iter([*found, *sorted(folder.glob("*.gguf"))]), folder / "tokenizer.model")


def tokenizer_files(path: str | Path) -> list[Path]:
    """Every file that `load_tokenizer` reads: the main file, and those beside it that say more of its special tokens."""
    file = find_tokenizer(path)
    beside = [file.parent / name for name in SIDE_FILES] if file.suffix == ".json" else []
    return [file, *(each for each in beside if each.exists())]


def find_chat_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """The built-in chat format called `name`, for prompts in the ids of `tokenizer`. Raises ConfigError."""
    if name not in CHAT_FORMATS:
        raise ConfigError(f"chat_format must be one of {', '.join(CHAT_FORMAT_NAMES)}", param="chat_format")
    found: ChatFormat = resolve_name(CHAT_FORMATS[name])(tokenizer)
    return found


def open_chat_format(
    name: str, tokenizer: Tokenizer, checkpoint: str | Path, template: str | None = None
) -> ChatFormat:
    """The chat format of the model at `checkpoint`, as the arguments `chat_format` and `chat_template` say.

    "auto" is the template given or found with the model, else for a folder of Meta's the format that goes with its tokenizer.
    A model without any gets `NoChatFormat`. Raises ConfigError or TokenizerError.
    """
    if name not in (AUTO, TEMPLATE):
        if template is not None and name in CHAT_FORMATS:
            raise ConfigError(f"chat_template contradicts chat_format {name}: set one of them", param="chat_template")
        return find_chat_format(name, tokenizer)
    folder = Path(checkpoint)
    found = given_template(template) if template is not None else find_template(folder)
    if found is not None:
        from llama_core.text.template.chat_template import TemplateChatFormat  # imports Jinja2
        from llama_core.text.tokenizers.hugging_face_files import SideFiles  # imports tokenizers

        named = SideFiles(folder).special_tokens if folder.is_dir() else {}
        return TemplateChatFormat(tokenizer, found.source, origin=found.origin, special_tokens=named)
    if name == TEMPLATE:
        raise ConfigError(
            f"chat_format template: {folder} has no chat template: set chat_template to one", param="chat_format"
        )
    if (folder / "params.json").is_file():  # Meta's files bring no template
        return find_chat_format("llama3" if HEADER_START in tokenizer.control_texts else "llama2", tokenizer)
    return NoChatFormat(tokenizer)
