"""Small tokenizers of every kind, trained in a second: folders in Hugging Face's format, a tiktoken file."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llama_core.text.tokenizers.library_tokenizer import bytes_of

CORPUS: Final = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's 12345 times lazier than 678 foxes.",
    "Les élèves naïfs où l'été déjà arrivé, ça va? Übergrößenträger grüßen süße Mädchen für 3,50 €.",
    "日本語のテキストと中文文本，以及한국어 문장도 있습니다。 Привет, мир! Καλημέρα κόσμε. שלום עולם",
    "def main(argv):\n    if not argv:\n        return 1\n\n\tprint('hello  world')   # done\r\n",
    "🦙🦙 👍🏽 e\u0301 <|im|> [INST] ** // \\\\ {}",
] * 8
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3_SPLIT: Final = _WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPLIT: Final = LLAMA3_SPLIT.replace("{1,3}", "")


def special(*names: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False, **flags) for name in names]


def byte_level(split: str | None, vocab_size: int = 700, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE without special tokens. split: the pattern; None for digits and GPT-2's pattern."""
    tokenizer = Tokenizer(models.BPE())
    if split is None:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(split), "isolated")
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_step])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        ),
    )
    if ignore_merges:
        tokenizer.model.ignore_merges = True
    return tokenizer


def llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(LLAMA3_SPLIT, ignore_merges=True)
    tokenizer.add_special_tokens(
        special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    )
    bos_id = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos_id)]
    )
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def qwen() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(QWEN_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("é∎", normalized=False)])
    config = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tokenizer, config


def smollm() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = byte_level(None)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_special_tokens(special("<fill>", lstrip=True, rstrip=True))
    return tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def prefix_space() -> tuple[Tokenizer, dict[str, Any]]:
    """As RoBERTa's tokenizer.json: each text between added tokens begins with a space, which decoding keeps."""
    tokenizer = byte_level(None)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer, {"bos_token": None, "eos_token": "<|im_end|>"}


def _sentencepiece_like() -> Tokenizer:
    """A BPE over characters with byte fallback, without normalizer and pre-tokenizer."""
    special_names = ["<unk>", "<s>", "</s>"]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=special_names, limit_alphabet=90),
    )
    content = json.loads(trained.to_str())
    pieces = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)[3:]
    vocab = {token: index for index, token in enumerate([*special_names, *alphabet, *pieces])}
    merges = [(left, right) for left, right in content["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(special(*special_names))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def llama2_legacy() -> tuple[Tokenizer, dict[str, Any]]:
    """As Llama 2's tokenizer.json: a normalizer writes the spaces, and each text between control tokens begins with one."""
    tokenizer = _sentencepiece_like()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False}
    bos = {"__type": "AddedToken", "content": "<s>"} | flags
    return tokenizer, {"bos_token": bos, "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}


def metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    """As Mistral's tokenizer.json: only the prompt's beginning gets a space."""
    tokenizer = _sentencepiece_like()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def unigram() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


FAMILIES: Final = {
    "llama3": llama3,
    "qwen": qwen,
    "smollm": smollm,
    "prefix_space": prefix_space,
    "llama2_legacy": llama2_legacy,
    "metaspace": metaspace,
    "unigram": unigram,
}


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> Path:
    """tokenizer.json and tokenizer_config.json, as transformers' PreTrainedTokenizerFast reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | dict(config)
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder / "tokenizer.json"


def make_family(family: str, folder: Path) -> Path:
    """The tokenizer.json of a small tokenizer of the family, in `folder`."""
    return write_folder(folder, *FAMILIES[family]())


def byte_ranks() -> dict[bytes, int]:
    """Ranks by token of a byte-level BPE, as tiktoken takes them: every byte, then tokens in the order of their merges."""
    vocab = byte_level(LLAMA3_SPLIT).get_vocab()
    tokens = sorted(vocab, key=lambda token: (len(token) > 1, vocab[token]))
    return {raw: rank for rank, raw in enumerate(map(bytes_of, tokens)) if raw is not None}


def write_tiktoken(path: Path) -> Path:
    """A file as Meta's Llama 3 has: a token in base64 and its rank on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in byte_ranks().items()]
    path.write_bytes(b"".join(lines))
    return path
