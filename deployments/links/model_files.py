"""The files of a model's tokenizer and templates, as an engine sends them to a front, whose node needs no checkpoint."""

import hashlib
import json
import tempfile
from pathlib import Path

import msgspec

from deployments.args import EngineArgs
from llama_core.files.gguf.file import GgufFile
from llama_core.text.model_text import ModelText, TextOptions, open_model_text
from llama_core.text.registry import load_tokenizer, tokenizer_files
from llama_core.text.template.files import given_template, template_files
from llama_core.text.tokenizers.files import CONFIG_FILE

_META_PARAMS = "params.json"  # tells a folder of Meta's, which has a chat format of its own


class PackedFile(msgspec.Struct, frozen=True, array_like=True):
    """head: the first bytes of a file of `size` bytes; of a GGUF file the header, else all."""

    size: int
    head: bytes


class ModelFiles(msgspec.Struct, frozen=True):
    """files: by path below the folders `tokenizer` and `checkpoint`. tokenizer, checkpoint: the paths that are opened."""

    files: dict[str, PackedFile]
    tokenizer: str
    checkpoint: str
    options: tuple[str, str | None, str]  # TextOptions
    num_rows: int | None
    vocab_size: int

    @property
    def tokenizer_digest(self) -> str:
        """Of what decides a text's tokens, and the text of tokens. Not of the template, nor of how these files are packed."""
        own = ((name, file) for name, file in sorted(self.files.items()) if name.startswith("tokenizer/"))
        heads = [(name, _without_template(name, file.head)) for name, file in own]
        decisive = heads, self.tokenizer, self.num_rows, self.vocab_size
        return hashlib.sha256(msgspec.msgpack.encode(decisive)).hexdigest()

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


def pack(args: EngineArgs, num_rows: int | None, vocab_size: int) -> ModelFiles:
    """num_rows, vocab_size: of the model's embedding, without and with its padding."""
    tokenizer, checkpoint = args.tokenizer, args.checkpoint
    is_file = checkpoint.is_file()
    beside = [checkpoint] if is_file else [*template_files(checkpoint), checkpoint / _META_PARAMS]
    if not is_file:
        beside += sorted(checkpoint.glob("*.gguf"))[:1]
    files = {f"tokenizer/{path.name}": path for path in tokenizer_files(tokenizer)}
    files |= {f"checkpoint/{path.name}": path for path in beside if path.is_file()}
    template = None if args.chat_template is None else given_template(args.chat_template).source
    return ModelFiles(
        {name: _packed(path) for name, path in sorted(files.items())},
        f"tokenizer/{tokenizer.name}",
        f"checkpoint/{checkpoint.name}" if is_file else "checkpoint",
        (args.chat_format, template, args.tool_format),
        num_rows,
        vocab_size,
    )


def unpack(packed: ModelFiles) -> ModelText:
    """Raises TokenizerError or ConfigError."""
    with tempfile.TemporaryDirectory(prefix="llama-model-") as directory:
        root = Path(directory)
        for folder in ("tokenizer", "checkpoint"):
            (root / folder).mkdir()
        for name, file in packed.files.items():
            folder, _, plain = name.partition("/")
            path = root / folder / Path(plain).name
            path.write_bytes(file.head)
            with path.open("r+b") as opened:
                opened.truncate(file.size)  # a GGUF file's tensors become a hole
        tokenizer = load_tokenizer(root / packed.tokenizer, packed.num_rows)
        options = TextOptions(*packed.options)
        return open_model_text(tokenizer, packed.vocab_size, root / packed.checkpoint, options)


def _without_template(name: str, head: bytes) -> bytes:
    if not name.endswith(f"/{CONFIG_FILE}"):
        return head
    fields = {field: value for field, value in json.loads(head).items() if field != "chat_template"}
    return json.dumps(fields, sort_keys=True).encode()


def _packed(path: Path) -> PackedFile:
    size = path.stat().st_size
    if path.suffix != ".gguf":
        return PackedFile(size, path.read_bytes())
    tensors = GgufFile(path).tensors.values()
    with path.open("rb") as file:
        return PackedFile(size, file.read(min((tensor.offset for tensor in tensors), default=size)))
