"""Serves the chat page: one file, read once, that asks nothing of anyone but this server."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).with_name("playground.html")


@cache
def _page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy, which names its one script and its one style sheet by their hashes."""
    html = PAGE.read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hashes(html, 'script')}",
        f"style-src {_hashes(html, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html.encode(), "; ".join(policy)


def _hashes(html: str, tag: str) -> str:
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies)


def playground_response() -> Response:
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")
