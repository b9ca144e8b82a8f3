"""The subcommands `up`, `estimate`, `chat` and `batch`: their options and help."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_URL, ApiKey, Model, Server, Url, checked_url, is_setting, size_option
from llama_core.config import BackendName, CacheDType, Device, DType
from llama_core.model.weight_formats import Quantization


def _model(argument: str) -> str:
    """Refuses what is neither a model nor a file."""
    from deployments.local.model_argument import fault_of_argument

    if fault := fault_of_argument(argument):
        raise typer.BadParameter(fault)
    return argument


def _model_or_setting(argument: str) -> str:
    return argument if is_setting(argument) else _model(argument)


def _checked_settings(settings: list[str] | None) -> list[str]:
    for setting in settings or ():
        key, equals, _ = setting.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{setting!r} is not of the form KEY=VALUE")
    return settings or []


def _model_and_settings(first: str, others: list[str]) -> tuple[str, list[str]]:
    """The first argument is MODEL, or a setting where a variable has MODEL."""
    if not is_setting(first):
        return first, others
    variables = "LLAMA_RAY_UP_MODEL", "LLAMA_RAY_UP_CONFIG", "LLAMA_RAY_CONFIG"
    model = next(filter(None, map(os.environ.get, variables)), None)
    if not model:
        raise typer.BadParameter(
            f"{first!r} is a setting: the model or the configuration file comes before it, such as serve_config.yaml",
            param_hint="MODEL",
        )
    return _model(model), [first, *others]


def up(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="org/name of a hub, a folder, a .gguf file, s3://, gs:// or https://; or Serve's configuration file.",
            parser=_model_or_setting,
            show_default=False,
            envvar=["LLAMA_RAY_UP_CONFIG", "LLAMA_RAY_CONFIG"],
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Arguments of the application, or http_options.NAME, in place of the file's. They follow MODEL.",
            show_default=False,
            callback=_checked_settings,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="NUMBER", help="Port; 8000, or the file's.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen at; 127.0.0.1, or the file's.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="COUNT", help="Ranks that share the model; as few as hold it, or the file's."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key that requests must have; several are separated by commas.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only make the checks, all of them, and name the remedy of each failure."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Show the lines of Ray, Serve and HAProxy here instead of in a log file."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="End the applications that run on the cluster which RAY_ADDRESS names."),
    ] = False,
) -> None:
    """Start a server for a model; Ctrl-C stops it.

    The model of a hub or a store is fetched once, and stays in the cache. Code in a repository never runs.

    Checks arguments, port, placement and files, starts a Ray cluster on this machine, or joins the one that RAY_ADDRESS names,
    loads the model, and prints the URL when the server is ready. The exit status is 0 after Ctrl-C, 1 if the server cannot
    start, 2 for wrong settings.

    With --check nothing starts, and of a remote model only headers are fetched. The checks then also read the checkpoint and
    the tokenizer, compute the digests of all files and estimate the memory. The exit status is 0 if no check failed, warnings
    included, 1 if one failed, 2 for wrong settings.

    Each argument of the application is a variable too, LLAMA_<ARGUMENT>, where neither the file nor KEY=VALUE sets it.

    \b
    Examples:
      llama-ray up org/name --port 9000
      llama-ray up org/name:Q4_0 max_seq_len=8Ki
      llama-ray up serve_config.yaml
      llama-ray up serve_config.yaml --check
      llama-ray up serve_config.yaml ckpt_dir=/models/Llama-3.1-8B max_seq_len=8Ki
      llama-ray up serve_config.yaml kv_cache_bytes=4GiB http_options.port=8080
    """
    from deployments.api_keys import digests_of
    from deployments.local import up as server
    from deployments.local.model_argument import USAGE

    if model is None:
        typer.echo(USAGE, err=True)
        sys.exit(2)
    argument, settings = _model_and_settings(model, overrides or [])
    options = {"http_options.port": port, "http_options.host": host, "model_parallel_size": ranks}
    settings += [f"{name}={value}" for name, value in options.items() if value is not None]
    if api_key is not None:
        settings.append(f"api_key_digests={json.dumps(digests_of(api_key))}")
    if check:
        sys.exit(server.check(argument, settings, replaces=replace))
    sys.exit(server.serve(argument, settings, verbose=verbose, replaces=replace))


def chat(
    server: Server = None,
    url: Url = DEFAULT_URL,
    question: Annotated[
        str | None,
        typer.Option(
            "-q",
            "--question",
            metavar="TEXT",
            help="Ask once, print the answer and end; - reads the question from stdin.",
        ),
    ] = None,
    model: Model = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message; none if absent.", envvar="LLAMA_RAY_SYSTEM"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=2,
            metavar="NUMBER",
            help="0 takes the most likely token, higher is more random; the server's default if absent.",
            envvar="LLAMA_RAY_TEMPERATURE",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="NUMBER",
            help="Sample from the likeliest tokens of this total probability; the server's default if absent.",
            envvar="LLAMA_RAY_TOP_P",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        size_option(
            "--max-tokens",
            help="Tokens of one answer at most; the server's default if absent.",
            envvar="LLAMA_RAY_MAX_TOKENS",
            metavar="TOKENS",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="The same seed gives the same answer; the server picks one if absent.",
            envvar="LLAMA_RAY_SEED",
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a model in the terminal.

    Answers stream. At the prompt: /reset, /system TEXT, /exit, /help; three quotes begin and end a message of several lines.
    Ctrl-C stops an answer, not the program. Lines are kept in ~/.local/state/llama-ray/chat_history; LLAMA_RAY_HISTORY names
    another file, empty for none. NO_COLOR=1 leaves colours out.

    With -q the answer alone goes to stdout, reasoning to stderr, and each tool call is a line of JSON. The exit status is 1 if
    a request failed.

    \b
    Examples:
      llama-ray chat http://10.0.0.5:8000 --system "Answer in one sentence."
      llama-ray chat -q "How many days are in a week?" --temperature 0
      cat letter.txt | llama-ray chat -q -
    """
    from cli.chat import run

    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    sys.exit(run(server or url, api_key, model, question, system, **sampling))


def _checked_gpu(name: str | None) -> str | None:
    from cli.estimate import GPU_BYTES

    if name is not None and name not in GPU_BYTES:
        raise typer.BadParameter(f"must be one of {', '.join(GPU_BYTES)}")
    return name


def estimate(
    context: typer.Context,
    ckpt: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As of up: org/name of a hub, a folder, a .gguf file, s3://, gs:// or https://, or a configuration file.",
            parser=_model,
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
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Tokenizer, or a name as of MODEL; what lies there if absent. Meta's files alone need it.",
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

    Reads headers and no weight, of a remote model too; of a Hugging Face folder, config.json is enough. Counts weights, a cache
    with every block written, and the working memory of the largest step; an empty rank process takes about 0.2 GB more. A
    second table has the memory of one rank by context and number of sequences. The exit status is 1 if the checkpoint is
    refused.

    An option that is absent has the value of the configuration file, of the server's variable, such as LLAMA_MAX_BATCH_SIZE, or
    the server's default.

    Lengths and sizes may have units: 8k is 8,000, 8Ki is 8,192, 512MB is 512,000,000, 4GiB is 4 x 2^30.

    \b
    Examples:
      llama-ray estimate org/name
      llama-ray estimate serve_config.yaml
      llama-ray estimate /models/Llama-3.1-8B-Instruct --ranks 2 --max-seq-len 8Ki
      llama-ray estimate model.gguf --batch 64 --kv-cache-bytes 4GiB --json
      llama-ray estimate /models/Llama-3.1-70B --ranks 8 --gpu h100
    """
    from cli.estimate import run

    # The other parameters have the names of the server's arguments.
    given = {
        name: value
        for name, value in context.params.items()
        if name not in ("ckpt", "gpu", "as_json") and value is not None
    }
    sys.exit(run(ckpt, given, gpu, as_json=as_json))


def batch(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="OpenAI's batch lines.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUTPUT", help="Gets the answers, one a line.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="As of up: start a server for the batch, and end it.",
            parser=_model,
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A running server, in place of MODEL.", callback=checked_url, show_default=False
        ),
    ] = None,
    in_flight: Annotated[
        int | None,
        size_option(
            "--in-flight", help="Requests at once; as many as the server runs sequences if absent.", metavar="COUNT"
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Answer a file of requests, one a line.

    Lines in and out are those of OpenAI's batches, for /v1/chat/completions, /v1/completions and /v1/responses. Answers come in
    any order. The same command again goes on where it was: it keeps the responses in OUTPUT, and asks for the rest.

    Requests have the lowest priority, so that others of the server go first. A line that cannot be asked, or fails, is an error
    in OUTPUT. The exit status is 0 if all lines have an answer, 1 if some have errors, 2 for wrong arguments.

    \b
    Examples:
      llama-ray batch questions.jsonl -o answers.jsonl --url http://127.0.0.1:8000
      llama-ray batch questions.jsonl -o answers.jsonl org/name
    """
    from cli.batch import run

    if (url is None) == (model is None):
        raise typer.BadParameter("give either MODEL or --url URL", param_hint="MODEL")
    sys.exit(run(source, output, url, model, api_key, in_flight))
