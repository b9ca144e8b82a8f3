"""The subcommands that are clients of a running server: their options and help."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_URL, ApiKey, Model, Server, Url, size_option


class Endpoint(StrEnum):
    """Routes that `bench` loads."""

    chat = "chat"
    completions = "completions"


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
    from cli.chat import Sampling, run

    sys.exit(run(server or url, api_key, model, question, system, Sampling(temperature, top_p, max_tokens, seed)))


def bench(
    url: Url = DEFAULT_URL,
    model: Model = None,
    endpoint: Annotated[
        Endpoint,
        typer.Option(
            help="chat sends prompts of --prompt-tokens words; completions of exactly as many random token ids.",
            envvar="LLAMA_RAY_ENDPOINT",
        ),
    ] = Endpoint.chat,
    concurrency: Annotated[
        int,
        size_option(
            "--concurrency", "-c", help="Requests in flight at once.", envvar="LLAMA_RAY_CONCURRENCY", metavar="COUNT"
        ),
    ] = 8,
    requests: Annotated[
        int,
        size_option(
            "--requests", "-n", help="Requests that are measured.", envvar="LLAMA_RAY_REQUESTS", metavar="COUNT"
        ),
    ] = 64,
    warmup: Annotated[
        int,
        size_option(
            "--warmup",
            help="Requests before those, which are not measured.",
            envvar="LLAMA_RAY_WARMUP",
            metavar="COUNT",
            least=0,
        ),
    ] = 2,
    prompt_tokens: Annotated[
        int,
        size_option(
            "--prompt-tokens",
            help="Length of each prompt, in words or ids: see --endpoint.",
            envvar="LLAMA_RAY_PROMPT_TOKENS",
            metavar="TOKENS",
        ),
    ] = 128,
    max_tokens: Annotated[
        int,
        size_option(
            "--max-tokens", help="Tokens of each answer at most.", envvar="LLAMA_RAY_MAX_TOKENS", metavar="TOKENS"
        ),
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            max=2,
            metavar="NUMBER",
            help="0 takes the most likely token, higher is more random.",
            envvar="LLAMA_RAY_TEMPERATURE",
        ),
    ] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Let each answer have exactly --max-tokens tokens, on servers that know the field ignore_eos.",
            envvar="LLAMA_RAY_IGNORE_EOS",
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", help="The same seed gives the same prompts.", envvar="LLAMA_RAY_SEED")
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="Time of one request at most.", envvar="LLAMA_RAY_TIMEOUT"),
    ] = 600.0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the figures to this file as a JSON object; - prints it to stdout instead of the table.",
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Measure the rates and latencies of an OpenAI-compatible server.

    A closed loop of streams: each client sends its next request when its last answer has ended. Latencies are in milliseconds:
    TTFT to the first token, TPOT per output token after it, ITL between two events, E2E of the whole request. Token counts are
    those of the server. The exit status is 1 if a request failed.

    Lengths may have units: 8k is 8,000, 8Ki is 8,192.

    \b
    Examples:
      llama-ray bench --concurrency 32 --requests 256
      llama-ray bench --endpoint completions --prompt-tokens 1k --ignore-eos
      llama-ray bench --url http://10.0.0.5:8000/v1 --json bench.json
    """
    from cli.bench import Plan, run

    plan = Plan(
        url,
        model,
        api_key,
        endpoint.value,
        concurrency,
        requests,
        warmup,
        prompt_tokens,
        max_tokens,
        temperature,
        ignore_eos,
        seed,
        timeout,
    )
    sys.exit(run(plan, json_file))
