"""An HTTP server that answers chat completions with scripted events, as a program: python -m tests.cli.scripted_server

The model's name says what is streamed. Prints its port, then each request's body as a line of JSON.
"""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CALL = [
    {"index": 0, "id": "call_7", "type": "function", "function": {"name": "weather", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"city": '}},
    {"index": 0, "function": {"arguments": '"Oslo"}'}},
]
DELTAS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " there."}],
    "reasons": [{"reasoning_content": "Let me"}, {"reasoning_content": " think."}, {"content": "Seven."}],
    "tool": [{"tool_calls": [part]} for part in CALL],
    "slow": [{"content": f"{number} "} for number in range(4000)],
    "breaks": [{"content": "half"}],
    "fails": [{"content": "half"}],
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "plain"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps({"path": self.path, "auth": self.headers["Authorization"], **body}), flush=True)
        model = body["model"]
        if model == "refuses":
            return self._answer(
                429, {"error": {"message": "too many requests wait", "type": "x", "param": None, "code": "x"}}
            )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for delta in DELTAS[model]:
                self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                time.sleep(0.02)
            if model == "fails":
                self._event({"error": {"message": "the ranks failed", "type": "x", "param": None, "code": "x"}})
            elif model != "breaks":
                self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            print('{"cancelled": true}', flush=True)
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": ping\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
