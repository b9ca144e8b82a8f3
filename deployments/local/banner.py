"""What a user sees when the server is ready: where it listens, what it serves, and two lines to paste."""

import sys
from collections.abc import Mapping
from typing import Any

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def base_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def banner(props: Mapping[str, Any], host: str, port: int) -> str:
    """`props` is what GET /props answers, or the replica's `describe`: "api_keys" says whether HTTP asks for keys."""
    url, model = base_url(host, port), props["model"]
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
