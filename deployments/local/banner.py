"""The banner of a server that is ready: its address, its model, its ranks, and two commands to paste."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def banner(props: Mapping[str, Any], host: str, port: int, prefix: str = "", *, log: Path | None = None) -> str:
    """`props` is the answer of GET /props, or the replica's `describe`, where "api_keys" tells whether HTTP asks for keys.

    prefix: the application's route prefix, without a slash at the end. log: the file with the lines of Ray, Serve and HAProxy.
    """
    url, model = base_url(host, port) + prefix, props["model"]
    ranks = ", ".join(f"{rank['device']}" for rank in props["ranks"])
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
            f"    model    {model} ({props['ranks'][0]['dtype']}, context {props['max_seq_len']} tokens)",
            f"    ranks    {props['world_size']}: {ranks}",
            f"    bind     {host}:{port}{public}",
            f"    auth     {auth}",
            f"    chat     {url}/      API reference {url}/docs",
            *((f"    log      {log}   (-v shows it here)",) if log is not None else ()),
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
