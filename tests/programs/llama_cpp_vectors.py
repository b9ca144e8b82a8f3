"""Compares the tokenizers of llama.cpp's vocabulary files with its own token vectors.

    python -m tests.programs.llama_cpp_vectors --sdist llama_cpp_python-0.3.36.tar.gz

The source distribution of `llama-cpp-python` has the vocabularies (ggml-vocab-*.gguf), the texts (.inp) and their ids (.out).
Also decodes every text's ids in pieces to the same text. Vocabularies of kinds that are not supported are named as skipped.
"""

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_core.errors import TokenizerError
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
FOLDER = "/vendor/llama.cpp/models/ggml-vocab-"


def vocabularies(sdist: Path, folder: Path) -> list[Path]:
    """Unpack the vocabularies and their vectors into `folder`."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            if FOLDER in member.name and (content := archive.extractfile(member)) is not None:
                (folder / Path(member.name).name).write_bytes(content.read())
    return sorted(folder.glob("*.gguf"))


def vectors(vocabulary: Path) -> list[tuple[str, list[int]]]:
    """Texts and their ids; none if the vocabulary has no vectors."""
    texts, ids = Path(f"{vocabulary}.inp"), Path(f"{vocabulary}.out")
    if not texts.exists():
        return []
    inputs = texts.read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    outputs = [[int(each) for each in line.split()] for line in ids.read_text().removesuffix("\n").split("\n")]
    return list(zip(inputs, outputs, strict=True))


def differences(tokenizer: Tokenizer, cases: Sequence[tuple[str, list[int]]]) -> Iterator[str]:
    for text, expected in cases:
        ids = tokenizer.encode(text, bos=False, eos=False)
        if ids != expected:
            yield f"    {text[:60]!r}: {ids[:20]} instead of {expected[:20]}"
        detokenizer = IncrementalDetokenizer(tokenizer)
        read = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
        if read != text:
            yield f"    {text[:60]!r}: decoded to {read[:60]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sdist", type=Path, required=True, help="llama_cpp_python-VERSION.tar.gz")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for path in vocabularies(options.sdist, Path(name)):
            cases = vectors(path)
            try:
                tokenizer = load_tokenizer(path)
            except TokenizerError as error:
                print(f"{path.name}: skipped, {error.message.removeprefix(f'{path}: ')}")
                continue
            found = list(differences(tokenizer, cases))
            failed |= bool(found)
            print(f"{path.name}: {tokenizer.n_words} tokens, {len(cases)} texts, {len(found)} differences")
            print("\n".join(found[:10]), end="\n" if found else "")
    sys.exit(failed)


if __name__ == "__main__":
    main()
