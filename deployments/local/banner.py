"""The banner of a server that is ready: its address, its model, its ranks, and two commands to paste."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MAX_RANKS_SHOWN: Final = 8
_FORMAT_NAMES: Final = {"meta": "Meta's files", "hugging_face": "Hugging Face's files", "gguf": "GGUF"}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DEMO = "llama-demo"
_REAL_MODEL = "    demo     it knows a small closed world; make serve MODEL=smollm2 serves a real model"


def base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "::0", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def banner(props: Mapping[str, Any], host: str, port: int, prefix: str = "", *, log: Path | None = None) -> str:
    """`props` is the answer of GET /props, or the replica's `describe`, where "api_keys" tells whether HTTP asks for keys.

    prefix: the application's route prefix, without a slash at the end. log: the file with the lines of Ray, Serve and HAProxy.
    """
    url, model = base_url(host, port) + prefix, props["model"]
    has_keys = props.get("api_keys", False)
    if has_keys:
        auth, header, key = (
            "every route but /health and /ready asks for an API key",
            " -H 'Authorization: Bearer KEY'",
            "KEY",
        )
    else:
        auth, header, key = "off: any or no API key is accepted", "", "none"
    lacks = "TLS" if has_keys else "authentication"
    public = "" if host in _LOOPBACK else f"   WARNING: reachable from other machines, without {lacks}"
    return "\n".join(
        (
            "",
            f"  Llama on Ray is ready at {url}",
            *_model_lines(props),
            f"    bind     {host}:{port}{public}",
            f"    auth     {auth}",
            f"    chat     {url}/      API reference {url}/docs",
            *((f"    log      {log}   (-v shows it here)",) if log is not None else ()),
            *([_REAL_MODEL] if model == _DEMO else []),
            "",
            "  Try:",
            f"    curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} "
            f'-d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}\'',
            f'    {sys.executable} -c \'import openai; print(openai.OpenAI(base_url="{url}/v1", api_key="{key}")'
            f'.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Who are you?"}}])'
            ".choices[0].message.content)'",
            "",
        )
    )


def _model_lines(props: Mapping[str, Any]) -> list[str]:
    """What is served: the model's files and format, its context, how a chat is written and ends, and each rank's share."""
    ranks = props["ranks"]
    files = _FORMAT_NAMES.get(props["checkpoint_format"], props["checkpoint_format"])
    stops = ", ".join(props["stop_tokens"]) or "no token"
    shown = [f"rank {rank['rank']}: {rank['share']}; {rank['weight_bytes'] / 1e6:,.0f} MB" for rank in ranks]
    devices = list(dict.fromkeys(rank["device"] for rank in ranks))
    on_devices = (
        f"each on {devices[0]}" if len(devices) == 1 < len(ranks) else "; ".join(rank["device"] for rank in ranks)
    )
    if len(shown) > MAX_RANKS_SHOWN:
        shown[MAX_RANKS_SHOWN:] = [f"and {len(shown) - MAX_RANKS_SHOWN} more, see /props"]
    return [
        f"    model    {props['model']} ({files}; {ranks[0]['dtype']})",
        f"    context  max_seq_len {props['max_seq_len']:,}, {props['max_seq_len_reason']}",
        f"    format   {props['chat_format']}; an answer ends at {stops}",
        f"    ranks    {props['world_size']}: {on_devices}",
        *(f"             {line}" for line in shown),
    ]
