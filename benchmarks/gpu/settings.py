"""What a run measures: the device, the model's shape, and the sizes of every section. Standard library only."""

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens, rows, requests and repetitions. long_context: max_seq_len with which short sequences are measured."""

    context: int
    prompt: int
    output: int
    rows: tuple[int, ...]
    buckets: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    attention_rows: tuple[int, ...]
    long_context: int
    mixed_decodes: int
    requests: int
    shortest: int
    longest: int
    repeats: int
    probe_bytes: int
    product_size: int
    loading_bytes: int
    loading_threads: tuple[int, ...]


FULL = Sizes(
    context=4096,
    prompt=2048,
    output=64,
    rows=(1, 8, 64),
    buckets=(1, 8, 64, 256),
    attention_lengths=(512, 2048, 4096, 16384),
    attention_rows=(1, 64, 256),
    long_context=131_072,
    mixed_decodes=32,
    requests=256,
    shortest=100,
    longest=512,
    repeats=20,
    probe_bytes=4 * 2**30,
    product_size=8192,
    loading_bytes=6 * 10**9,
    loading_threads=(1, 2, 4, 8),
)
# Of a run in a quarter of an hour: fewer sizes, and fewer repetitions of each.
SHORT = replace(
    FULL,
    output=32,
    rows=(1, 64),
    buckets=(1, 64),
    attention_lengths=(2048, 16384),
    attention_rows=(1, 64),
    repeats=8,
    probe_bytes=2 * 2**30,
    loading_bytes=2 * 10**9,
    loading_threads=(1, 2, 4),
)
TINY = Sizes(
    context=64,
    prompt=24,
    output=4,
    rows=(1, 2),
    buckets=(1, 2),
    attention_lengths=(16, 40),
    attention_rows=(1, 2),
    long_context=400,
    mixed_decodes=2,
    requests=4,
    shortest=4,
    longest=8,
    repeats=2,
    probe_bytes=2**20,
    product_size=64,
    loading_bytes=2**20,
    loading_threads=(1, 2),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """device: "cuda" or "cpu". shape: of `make_checkpoint`. is_tiny: sizes that a CPU computes in seconds. is_short: those of a
    run in a quarter of an hour."""

    device: str = "cuda"
    shape: str = "llama-2-7b"
    dtype: str = "bfloat16"
    vocab_size: int = 32000
    is_tiny: bool = False
    is_short: bool = False

    @property
    def sizes(self) -> Sizes:
        return TINY if self.is_tiny else SHORT if self.is_short else FULL

    @property
    def arguments(self) -> list[str]:
        """The options that give these settings to another process."""
        words = ["--device", self.device, "--shape", self.shape, "--dtype", self.dtype]
        return [
            *words,
            "--vocab-size",
            str(self.vocab_size),
            *(["--tiny"] * self.is_tiny),
            *(["--short"] * self.is_short),
        ]

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="llama-2-7b", help="of `make_checkpoint`; its weights are random")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--short", action="store_true", help="fewer sizes and repetitions, as --minutes 13 takes")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which show that every section runs")


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(options.device, options.shape, options.dtype, options.vocab_size, options.tiny, options.short)
