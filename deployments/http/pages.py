"""Serves the two HTML pages: the chat page and the API reference.

Each page is sent as one document. Its Content-Security-Policy admits the page's own script and style sheet by their hashes, and
requests to this server only.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

CHAT = Path(__file__).parent / "chat_page" / "index.html"
# Beside CHAT, in the order in which they are needed.
SCRIPTS = ("dom.js", "store.js", "markdown.js", "tokens.js", "status.js", "chat.js", "main.js")
API_REFERENCE = Path(__file__).with_name("docs.html")


def page_response(path: Path) -> Response:
    html, policy = _page(path)
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


@cache
def _page(path: Path) -> tuple[bytes, str]:
    """The page and its Content-Security-Policy."""
    html = path.read_text(encoding="utf-8")
    if path == CHAT:
        script = "".join((path.parent / name).read_text(encoding="utf-8") for name in SCRIPTS)
        style = (path.parent / "style.css").read_text(encoding="utf-8")
        html = html.replace("<style></style>", f"<style>{style}</style>")
        html = html.replace("<script></script>", f"<script>{script}</script>")
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
