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
    """`props` is what GET /props answers."""
    url, model = base_url(host, port), props["model"]
    ranks = ", ".join(f"{rank['device']}" for rank in props["ranks"])
    public = "" if host in _LOOPBACK else "   WARNING: reachable from other machines, without authentication"
    return "\n".join(
        (
            "",
            f"  Llama on Ray is ready at {url}",
            f"    model    {model} ({props['ranks'][0]['dtype']}, context {props['max_seq_len']} tokens)",
            f"    ranks    {props['world_size']}: {ranks}",
            f"    bind     {host}:{port}{public}",
            "    auth     off: any or no API key is accepted",
            f"    chat     {url}/      API reference {url}/docs",
            "",
            "  Try:",
            f"    curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
            f'-d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}\'',
            f'    {sys.executable} -c \'import openai; print(openai.OpenAI(base_url="{url}/v1", api_key="none")'
            f'.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Who are you?"}}])'
            ".choices[0].message.content)'",
            "",
        )
    )
