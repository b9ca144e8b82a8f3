"""`llama-ray batch`: has a server answer a file of OpenAI's batch lines, and goes on where an earlier run has ended.

Each line of the input gets one line in the output, when its answer comes: a response, or an error without one. A restart keeps
the responses and asks for the rest. Memory grows with the ids alone.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import httpx
from tqdm import tqdm

from cli.openai_http import ApiError, api_base, error_text
from deployments.local import process_tag
from deployments.local.haproxy import free_ports

INTERRUPTED: Final = 130  # the exit status of a command that a shell's Ctrl-C ended
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
BACKGROUND: Final = 100  # the priority of requests that run only while the server has no others
RETRY_S: Final = 1.0  # after a broken connection
MAX_BROKEN: Final = 8  # connections that break while a server answers one line: then the line is an error
PATIENCE_S: Final = 600.0  # of one line for a server that is away
BEGIN: Final = b'{"id": "batch_req_'  # of a line of the output
REPORT_EVERY_S: Final = 10.0  # where no terminal shows a bar
# A server sends nothing while it computes an answer, so TCP finds out whether its machine is still there.
KEEPALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class InvalidLine(ValueError):
    """A line of the input that no server is asked for."""


class Request(NamedTuple):
    """content: the body as it is sent."""

    custom_id: str
    path: str
    content: bytes

    @classmethod
    def of(cls, custom_id: str, line: Mapping[str, Any], priority: int) -> "Request":
        """Raises InvalidLine. The same id gives the same seed, so that a restart does not change the answers."""
        path, body = line.get("url"), line.get("body")
        if line.get("method", "POST") != "POST" or path not in PATHS:
            raise InvalidLine(f"method and url must be POST and one of {', '.join(PATHS)}")
        if not isinstance(body, dict) or body.get("stream"):
            raise InvalidLine("body must be an object, without stream")
        digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
        fields = {"priority": priority, "seed": int.from_bytes(digest, signed=True), **body}
        return cls(custom_id, path, json.dumps(fields).encode())


class Output:
    """The file of answers, which one run writes. answered: ids of the responses of an earlier run; num_refused: how many
    of them are errors."""

    def __init__(self, path: Path) -> None:
        """Drops a torn last line, and errors that may not come again. Raises ValueError where the file is not a batch's, or
        another run writes it."""
        self.answered: set[str] = set()
        self.num_refused = 0
        path = path.resolve()
        kept = path.with_name(f"{path.name}.kept")
        with path.open("ab+") as former:
            _lock(former, path)
            former.seek(0)
            self._file = kept.open("wb")
            _lock(self._file, path)
            for number, line in enumerate(former, 1):
                if not line.endswith(b"\n") and line[: len(BEGIN)] == BEGIN[: len(line)]:
                    break
                try:
                    answer = json.loads(line)
                    custom_id, response, _ = answer["custom_id"], answer["response"], answer["error"]
                    status = response["status_code"] if response else 0
                except (ValueError, LookupError, TypeError, RecursionError):
                    kept.unlink()
                    raise ValueError(f"{path}, line {number}, is no answer of a batch: name another file") from None
                if 200 <= status < 500 and status not in (408, 429):
                    self.answered.add(custom_id)
                    self.num_refused += status >= 300
                    self._file.write(line)
            self._file.flush()
            kept.replace(path)

    def write(self, custom_id: str | None, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> None:
        name = (response or {}).get("request_id") or uuid.uuid4().hex
        answer = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is written by another run") from None


class Lines:
    """Where a bar is written when no terminal shows it: each of its states is a line."""

    def write(self, text: str) -> None:
        sys.stderr.write(text.replace("\r", "\n"))

    def flush(self) -> None:
        sys.stderr.flush()


class Progress:
    """A bar with tokens a second, and lines a second by the latest ones."""

    def __init__(self, num_lines: int, output: Output) -> None:
        self.num_errors, self._num_tokens, self._begin_s = output.num_refused, 0, time.monotonic()
        lines: dict[str, Any] = {"file": Lines(), "mininterval": REPORT_EVERY_S, "miniters": 1}
        where = {} if sys.stderr.isatty() else lines
        self._bar = tqdm(total=num_lines, initial=len(output.answered), unit="line", **where)

    def add(self, *, num_tokens: int = 0, is_error: bool = False) -> None:
        self.num_errors += is_error
        self._num_tokens += num_tokens
        rate = self._num_tokens / max(time.monotonic() - self._begin_s, 1e-3)
        self._bar.set_postfix_str(f"{rate:,.0f} tok/s, {self.num_errors} errors", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class Batch:
    """Asks one server for the lines of `source`."""

    def __init__(self, source: Path, output: Output, server: "OwnServer | None" = None) -> None:
        self._source, self._output, self._server = source, output, server
        with source.open("rb") as lines:
            self.progress = Progress(sum(not line.isspace() for line in lines), output)
        self._heard_s = 0.0  # the last answer

    async def run(self, url: str, api_key: str | None, in_flight: int | None) -> None:
        """Raises ApiError and OSError, alone or in a group."""
        async with httpx.AsyncClient(
            base_url=api_base(url).removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key or 'none'}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(None, connect=10),  # a request of the lowest priority may wait for hours
            transport=httpx.AsyncHTTPTransport(limits=httpx.Limits(), socket_options=KEEPALIVE),
        ) as client:
            useful, requests = await _useful_in_flight(client), self._requests()
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight or useful):
                    group.create_task(self._work(client, requests))

    async def _work(self, client: httpx.AsyncClient, requests: Iterator[Request]) -> None:
        for request in requests:
            await self._answer(client, request)

    def _requests(self) -> Iterator[Request]:
        """The lines without a response; what cannot be asked becomes an error."""
        seen: set[str] = set()
        priority = BACKGROUND if self._server is None else 0
        with self._source.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                if raw.isspace():
                    continue
                custom_id = None
                try:
                    line = _object(raw)
                    if not isinstance(given := line.get("custom_id"), str):
                        raise InvalidLine("custom_id must be a text")
                    custom_id = given
                    if custom_id in seen:
                        raise InvalidLine("an earlier line has the same custom_id")
                    seen.add(custom_id)
                    if custom_id not in self._output.answered:
                        yield Request.of(custom_id, line, priority)
                except InvalidLine as error:
                    self._fail(custom_id, "invalid_line", f"line {number}: {error}")

    async def _answer(self, client: httpx.AsyncClient, request: Request) -> None:
        """Raises ApiError where no line has had an answer since this one was asked first."""
        num_broken, waited_s, began_s, reason = 0, 0.0, time.monotonic(), ""
        while num_broken < MAX_BROKEN and waited_s < PATIENCE_S:
            wait_s, is_others_turn = RETRY_S, False
            try:
                response = await client.post(request.path, content=request.content)
            except httpx.TransportError as error:
                num_broken += not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                reason = f"the connection broke: {error or type(error).__name__}"
            else:
                if "retry-after" not in response.headers:
                    return self._keep(request, response)
                num_broken += response.status_code == 502
                is_others_turn = response.status_code == 429
                reason = error_text(response.status_code, response.content)
                with contextlib.suppress(ValueError):  # a proxy may name a date
                    wait_s = float(response.headers["retry-after"])
            if self._server is not None:
                self._server.check()
            await asyncio.sleep(wait_s)
            waited_s += 0.0 if is_others_turn else wait_s
        if waited_s >= PATIENCE_S and self._heard_s < began_s:
            raise ApiError(f"no answer for {PATIENCE_S:.0f} s: {reason}")
        self._fail(request.custom_id, "no_answer", reason)

    def _keep(self, request: Request, response: httpx.Response) -> None:
        self._heard_s = time.monotonic()
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError):
            body = response.text
        status, request_id = response.status_code, response.headers.get("x-request-id", "")
        self._output.write(request.custom_id, {"status_code": status, "request_id": request_id, "body": body}, None)
        usage = (body.get("usage") if isinstance(body, dict) else None) or {}
        num_tokens = usage.get("completion_tokens") or usage.get("output_tokens") or 0
        self.progress.add(num_tokens=num_tokens, is_error=status >= 300)

    def _fail(self, custom_id: str | None, code: str, message: str) -> None:
        self._output.write(custom_id, None, {"code": code, "message": message})
        self.progress.add(is_error=True)


def _object(raw: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(line := json.loads(raw), dict):
            return line
    raise InvalidLine("not a JSON object")


async def _useful_in_flight(client: httpx.AsyncClient) -> int:
    """Requests that keep every slot of the server's engines busy, with some that wait for a slot. Raises ApiError."""
    try:
        response = await client.get("/props")
    except httpx.TransportError as error:
        raise ApiError(f"{client.base_url} cannot be reached: {error}. Is the server running? Set --url.") from None
    if response.status_code != 200:
        raise ApiError(f"GET /props: {error_text(response.status_code, response.content)}")
    props = response.json()
    num_engines = [engine["model"] for engine in props["engines"]].count(props["model"])
    num_slots = int(props["max_batch_size"])
    return int(max(1, num_engines) * (num_slots + min(num_slots // 8, int(props["max_queue"]))))


class OwnServer:
    """`llama-ray up` with a key of its own, on a free port of loopback. It ends with this process, however that ends."""

    def __init__(self, model: str) -> None:
        tag, directory = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="llama-ray-batch-"))
        process_tag.start_watcher(tag, str(directory))
        self.key, (port,) = secrets.token_urlsafe(), free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._said = directory / "output"
        with self._said.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cli", "up", model, "--host", "127.0.0.1", "--port", str(port)],
                env=os.environ | {process_tag.VARIABLE: tag, "LLAMA_RAY_UP_API_KEY": self.key},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this command, which ends the server
            )

    def check(self) -> None:
        """Raises ApiError if the server has ended."""
        if self._process.poll() is not None:
            raise ApiError(f"the server has ended:\n{self._said.read_text(errors='replace')[-2000:].strip()}")

    def wait_ready(self) -> None:
        """Raises ApiError if the server ends before."""
        status = 0
        while status != 200:
            self.check()
            time.sleep(0.1)
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"{self.url}/ready", trust_env=False, timeout=10).status_code

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def run(
    source: Path, path: Path, url: str | None, model: str | None, api_key: str | None, in_flight: int | None
) -> int:
    """One of `url` and `model` is given. Returns the exit status: 0 if every line has an answer, 1 if some are errors or the
    server has ended, 2 for a wrong OUTPUT, 130 for Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        output = Output(path)
    except (OSError, ValueError) as error:
        print(f"batch: {error}", file=sys.stderr)
        return 2
    status = 1
    try:
        with contextlib.ExitStack() as stack:
            server = None
            if model is not None:
                print(f"starting {model}", file=sys.stderr, flush=True)
                server = stack.enter_context(contextlib.closing(OwnServer(model)))
                server.wait_ready()
                url, api_key = server.url, server.key
            assert url is not None
            batch = Batch(source, output, server)
            with contextlib.closing(batch.progress) as progress:
                asyncio.run(batch.run(url, api_key, in_flight))
            status = int(progress.num_errors > 0)
    except* (ApiError, OSError) as errors:
        print(f"batch: {errors.exceptions[0]}", file=sys.stderr)
    except* KeyboardInterrupt:
        status = INTERRUPTED
    return status
