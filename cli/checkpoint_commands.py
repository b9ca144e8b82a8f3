"""The subcommand `estimate`: its options and help."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import size_option
from llama_core.config import BackendName, CacheDType, Device, DType
from llama_core.weight_formats import Quantization


def _checked_gpu(name: str | None) -> str | None:
    from cli.estimate import GPU_BYTES

    if name is not None and name not in GPU_BYTES:
        raise typer.BadParameter(f"must be one of {', '.join(GPU_BYTES)}")
    return name


def estimate(
    context: typer.Context,
    ckpt: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT",
            help="A folder in Hugging Face's or Meta's format, a GGUF file, or Serve's configuration file (.yaml).",
            exists=True,
            envvar="LLAMA_CKPT_DIR",
        ),
    ],
    model_parallel_size: Annotated[
        int | None,
        typer.Option("--ranks", min=1, metavar="COUNT", help="Ranks that share the model: model_parallel_size."),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        size_option("--max-seq-len", help="Prompt and generated tokens of one sequence.", metavar="TOKENS"),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        size_option("--batch", "--max-batch-size", help="Sequences that run at once.", metavar="COUNT"),
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and cache; auto: the checkpoint's own.")] = None,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Format of linear layers; auto: as stored, none: as --dtype.")
    ] = None,
    tokenizer_path: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Tokenizer; what lies at CKPT if absent. Meta's files alone need it.",
            exists=True,
        ),
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(help="Where the ranks compute; auto: cuda if a GPU is here. No GPU is needed for cuda."),
    ] = None,
    backend: Annotated[BackendName | None, typer.Option(help="auto: as the server chooses on that device.")] = None,
    block_size: Annotated[
        int | None, size_option("--block-size", help="Tokens of one cache block.", metavar="TOKENS")
    ] = None,
    kv_cache_bytes: Annotated[
        int | None,
        size_option(
            "--kv-cache-bytes", help="Cache of one rank at most, in bytes; a full batch of full length if absent."
        ),
    ] = None,
    kv_cache_dtype: Annotated[CacheDType | None, typer.Option(help="Of the cache; auto: as --dtype.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Also show the cache that this GPU holds, such as h100; a wrong name lists all.",
            metavar="NAME",
            callback=_checked_gpu,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, in bytes, instead of tables.")] = False,
) -> None:
    """Show the memory of each rank before anything is loaded.

    Reads the header of the checkpoint and no weight; of a Hugging Face folder, config.json is enough. Counts weights, a cache
    with every block written, and the working memory of the largest step; an empty rank process takes about 0.2 GB more. A
    second table has the memory of one rank by context and number of sequences. The exit status is 1 if the checkpoint is
    refused.

    An option that is absent has the value of the configuration file, of the server's variable, such as LLAMA_MAX_BATCH_SIZE, or
    the server's default.

    Lengths and sizes may have units: 8k is 8,000, 8Ki is 8,192, 512MB is 512,000,000, 4GiB is 4 x 2^30.

    \b
    Examples:
      llama-ray estimate serve_config.yaml
      llama-ray estimate /models/Llama-3.1-8B-Instruct --ranks 2 --max-seq-len 8Ki
      llama-ray estimate model.gguf --batch 64 --kv-cache-bytes 4GiB --json
      llama-ray estimate /models/Llama-3.1-70B --ranks 8 --gpu h100
    """
    from cli.estimate import run

    # The other parameters have the names of the server's arguments.
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in context.params.items()
        if name not in ("ckpt", "gpu", "as_json") and value is not None
    }
    sys.exit(run(ckpt, given, gpu, as_json=as_json))
