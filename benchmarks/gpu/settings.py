"""What a run measures: the device, the model, and the sizes of every section. Standard library only."""

import argparse
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens, rows, requests and repetitions. long_context: max_seq_len with which short sequences are measured."""

    context: int = 4096
    prompt: int = 2048
    output: int = 32
    rows: tuple[int, ...] = (1, 8, 64)
    attention_lengths: tuple[int, ...] = (2048, 16384)
    attention_rows: tuple[int, ...] = (1, 64)
    long_context: int = 131_072
    mixed_decodes: int = 32
    requests: int = 256
    shortest: int = 100
    longest: int = 512
    repeats: int = 10
    probe_bytes: int = 2 * 2**30
    product_size: int = 8192
    loading_bytes: int = 2 * 10**9
    loading_threads: tuple[int, ...] = (1, 2, 4)


TINY = Sizes(
    context=64,
    prompt=24,
    output=4,
    rows=(1, 2),
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
    """device: "cuda" or "cpu". shape: of `make_checkpoint`. is_tiny: sizes that a CPU computes in seconds."""

    device: str = "cuda"
    shape: str = "llama-2-7b"
    dtype: str = "bfloat16"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    vocab_size: int = 32000
    temperature: float = 0.0
    is_tiny: bool = False

    @property
    def sizes(self) -> Sizes:
        return TINY if self.is_tiny else Sizes()

    @property
    def arguments(self) -> list[str]:
        """The options that give these settings to another process."""
        given = self.as_data()
        words = ["--tiny"] if given.pop("is_tiny") else []
        return words + [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="llama-2-7b", help="of `make_checkpoint`; its weights are random")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", default="none", help="of the random weights")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the decodes")
    parser.add_argument("--tiny", action="store_true", dest="is_tiny", help="sizes for a CPU, to see that all runs")


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
