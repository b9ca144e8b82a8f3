"""The installed command `llama-ray`. Subcommands import their modules when they run, so that `--help` is fast."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.capture_commands import capture, replay
from cli.client_commands import bench, chat
from cli.options import size_option

app = typer.Typer(
    name="llama-ray",
    help="Serve Llama checkpoints on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Serve Llama checkpoints on Ray."""


@app.command()
def up(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="Serve's configuration file.", exists=True, dir_okay=False, show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Arguments of the application, or http_options.port=N; each replaces the file's value.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show the lines of Ray, Serve and HAProxy on the terminal.")
    ] = False,
) -> None:
    """Start a server, print a banner when it is ready, and stop it on Ctrl-C."""
    from deployments.local.up import serve_file

    sys.exit(serve_file(config, overrides or (), verbose=verbose))


class ConvertFormat(StrEnum):
    """Formats that `convert` writes."""

    HF = "hf"
    META = "meta"


class ConvertDType(StrEnum):
    """Dtypes that `convert` writes."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class ConvertQuantize(StrEnum):
    """Formats of groups that `convert` writes."""

    INT4 = "int4"
    INT8 = "int8"


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder of Hugging Face's or Meta's, or a GGUF file.", exists=True)],
    target: Annotated[Path, typer.Argument(help="The folder to write, which must not exist.")],
    target_format: Annotated[ConvertFormat, typer.Option("--format", help="The format to write.")],
    shards: Annotated[int, typer.Option(min=1, help="Files of weights.")] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer; if absent, what lies at SOURCE.", exists=True)
    ] = None,
    dtype: Annotated[
        ConvertDType, typer.Option(help="Of the weights; auto is SOURCE's own. Quantized weights are expanded.")
    ] = ConvertDType.AUTO,
    quantize: Annotated[
        ConvertQuantize | None,
        typer.Option(
            help="Pack linear layers but the output layer as compressed-tensors, in groups of 32; --format hf only."
        ),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Load both checkpoints and compare their logits.")] = True,
) -> None:
    """Write a checkpoint in another format, with SHA256SUMS, and compare the logits of both."""
    from cli.convert import run

    quantized: Literal["int4", "int8"] | None = quantize.value if quantize is not None else None
    sys.exit(run(source, target, target_format.value, shards, tokenizer, dtype.value, quantized, verify=verify))


class Quantization(StrEnum):
    """Values of the argument `quantization`."""

    auto = "auto"
    none = "none"
    int8 = "int8"
    int8_groups = "int8_groups"
    int4 = "int4"
    int4_min = "int4_min"
    fp8 = "fp8"


class CacheDTypeName(StrEnum):
    """Values of the argument `kv_cache_dtype`."""

    auto = "auto"
    fp8 = "fp8"


class DeviceName(StrEnum):
    """Values of the argument `device`."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Backend(StrEnum):
    """Values of the argument `backend`."""

    auto = "auto"
    native = "native"
    fused = "fused"
    torch = "torch"


@app.command()
def estimate(
    ckpt: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="A folder of Hugging Face's or Meta's, or a GGUF file.", exists=True),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks; if absent, the shards of Meta's files, else 1.", envvar="LLAMA_MODEL_PARALLEL_SIZE"
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        size_option(
            "--max-seq-len",
            help="Prompt and generated tokens of one sequence; the model's own context if absent.",
            envvar="LLAMA_MAX_SEQ_LEN",
            metavar="TOKENS",
        ),
    ] = None,
    batch: Annotated[
        int,
        size_option(
            "--batch",
            "--max-batch-size",
            help="Sequences that run at once.",
            envvar="LLAMA_MAX_BATCH_SIZE",
            metavar="COUNT",
        ),
    ] = 32,
    dtype: Annotated[
        ConvertDType, typer.Option(help="Of weights and cache; auto: the checkpoint's own.", envvar="LLAMA_DTYPE")
    ] = ConvertDType.AUTO,
    quantization: Annotated[
        Quantization,
        typer.Option(help="Weights of linear layers; auto: as stored, none: as dtype.", envvar="LLAMA_QUANTIZATION"),
    ] = Quantization.auto,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The tokenizer; if absent, what lies at CKPT.", envvar="LLAMA_TOKENIZER_PATH", exists=True),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option(help="Where the ranks compute.", envvar="LLAMA_DEVICE")
    ] = DeviceName.auto,
    backend: Annotated[
        Backend, typer.Option(help="auto: the fastest one possible.", envvar="LLAMA_BACKEND")
    ] = Backend.auto,
    block_size: Annotated[
        int, size_option("--block-size", help="Tokens of one cache block.", envvar="LLAMA_BLOCK_SIZE", metavar="TOKENS")
    ] = 16,
    kv_cache_bytes: Annotated[
        int | None,
        size_option(
            "--kv-cache-bytes",
            help="Cache memory of one rank at most; if absent, a full batch of full length.",
            envvar="LLAMA_KV_CACHE_BYTES",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        CacheDTypeName, typer.Option(help="Of the cache; auto: as dtype.", envvar="LLAMA_KV_CACHE_DTYPE")
    ] = CacheDTypeName.auto,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Also estimate the time of steps on this GPU, such as h100; a wrong name lists all.", metavar="NAME"
        ),
    ] = None,
    context: Annotated[
        int,
        size_option("--context", help="With --gpu: cached tokens of a decode.", envvar=None, metavar="TOKENS"),
    ] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as JSON.")] = False,
) -> None:
    """Memory of each rank, by context and concurrency, from a checkpoint's header alone.

    Loads no weight. Counts weights, a cache with every block written, and the working memory of the largest step; an empty rank
    process takes about 0.2 GB more.

    Sizes and lengths: 8k is 8,000, 8Ki is 8,192, 512MB is 512,000,000, 4GiB is 4 x 2^30.

    Examples:

      llama-ray estimate /models/Llama-3.1-8B-Instruct --ranks 2 --max-seq-len 8Ki

      llama-ray estimate model.gguf --batch 64 --json

      llama-ray estimate /models/Llama-3.1-70B --ranks 8 --gpu h100
    """
    from cli.estimate import Request, run

    request = Request(
        ckpt,
        ranks,
        max_seq_len,
        batch,
        dtype.value,
        quantization.value,
        tokenizer,
        device.value,
        backend.value,
        block_size,
        kv_cache_bytes,
        kv_cache_dtype.value,
        gpu,
        context,
    )
    sys.exit(run(request, as_json=as_json))


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="Serve's configuration file; the server's defaults if absent.",
            exists=True,
            dir_okay=False,
            show_default=False,
            envvar="LLAMA_RAY_CONFIG",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="As for `llama-ray up`.", show_default=False),
    ] = None,
    digests: Annotated[
        bool, typer.Option(help="Read all files and compare their digests.", envvar="LLAMA_RAY_DIGESTS")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Compare what a server needs with what there is, and print the remedy of each failure.

    Checks Python, Ray, HAProxy, open files, /dev/shm, the port, arguments, the C++ compiler, GPUs, placement (on the cluster
    that RAY_ADDRESS names, else on this machine), checkpoint, tokenizer, digests and memory. Starts no server. The exit status
    is 1 if a check fails, 0 with warnings alone.

    Examples:

      llama-ray doctor serve_config.yaml

      llama-ray doctor serve_config.yaml http_options.port=8080 max_seq_len=8Ki --no-digests
    """
    from cli.doctor.command import run

    sys.exit(run(config, overrides or (), reads_files=digests, as_json=as_json))


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, CPU flags, backend and settings, for a bug report.

    Values of variables that may hold a secret are masked. Compiles the C++ library if there is none yet.

    Example: llama-ray env --json > env.json
    """
    from cli.env import run

    sys.exit(run(as_json=as_json))


app.command()(chat)
app.command()(bench)
app.command()(capture)
app.command()(replay)


def main() -> None:
    """Entry point of `llama-ray`."""
    app()
