"""`llama-ray chat`: a conversation in the terminal with any OpenAI-compatible server."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from cli.openai_http import ApiError, OpenAIHttp

HELP: Final = """/reset          start a new conversation
/system TEXT    set the system message and start a new conversation; without TEXT, remove it
/exit           leave (also Ctrl-D)
/help           show this text
Ctrl-C          stop the answer; at the prompt, clear the line
\"\"\"             begin and end a message of several lines"""
HISTORY_LINES: Final = 1000
INTERRUPTED: Final = 130  # the exit status of a command that a shell's Ctrl-C ended


@dataclass(slots=True)
class Answer:
    """What has arrived of an answer. tool_calls: by index, each with its name and the text of its arguments."""

    content: str = ""
    reasoning: str = ""
    tool_calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Take a chunk in. Yields (kind, text) of what is to be shown; kind: "reasoning", "content" or "tool"."""
        self.usage = chunk.get("usage") or self.usage
        for choice in (chunk.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if text := delta.get("reasoning_content") or delta.get("reasoning"):
                self.reasoning += text
                yield "reasoning", text
            if text := delta.get("content"):
                self.content += text
                yield "content", text
            for part in delta.get("tool_calls") or []:
                yield from self._add_tool_call(part)

    def message(self) -> dict[str, Any]:
        """As the next request has it."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call["id"] or f"call_{index}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for index, call in sorted(self.tool_calls.items())
            ]
        return found

    def _add_tool_call(self, part: dict[str, Any]) -> Iterator[tuple[str, str]]:
        function = part.get("function") or {}
        index = part.get("index", 0)
        is_new = index not in self.tool_calls
        call = self.tool_calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        call["id"] = part.get("id") or call["id"]
        if name := function.get("name"):
            call["name"] += name
        if is_new:
            yield "tool", f"\ntool call {call['name']}: "
        if arguments := function.get("arguments"):
            call["arguments"] += arguments
            yield "tool", arguments


class Conversation:
    """The messages so far, and the server that answers them."""

    def __init__(self, client: OpenAIHttp, model: str, system: str | None, sampling: Mapping[str, Any]) -> None:
        """sampling: fields of the request."""
        self._client = client
        self._model = model
        self._sampling = sampling
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Start a new conversation."""
        self.system = system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str, answer: Answer) -> Iterator[tuple[str, str]]:
        """Stream the answer into `answer` and yield what to show. Messages are kept when the whole answer, or a part of it, has
        arrived; a question without any answer is dropped. Raises ApiError."""
        question = {"role": "user", "content": text}
        body = {"model": self._model, "messages": [*self.messages, question], **self._sampling}
        try:
            with closing(self._client.stream("/chat/completions", body)) as chunks:  # type: ignore[type-var]
                for chunk in chunks:
                    yield from answer.add(chunk)
        finally:
            if answer.content or answer.tool_calls:
                self.messages += [question, answer.message()]


class Screen:
    """Writes an answer as it arrives: reasoning dim and tool calls yellow on a terminal, everything plain elsewhere."""

    STYLES: Final = {"reasoning": "\033[2m", "tool": "\033[33m", "content": ""}

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._has_colour = out.isatty() and "NO_COLOR" not in os.environ
        self._kind = ""
        self._last = "\n"

    def write(self, kind: str, text: str) -> None:
        if kind != self._kind and self._kind and kind == "content":
            self._put("\n\n" if self._kind == "reasoning" else "\n")
        self._kind = kind
        style = self.STYLES[kind] if self._has_colour else ""
        self._put(f"{style}{text}\033[0m" if style else text)
        self._last = text[-1]

    def end(self) -> None:
        """End the line, if it is not ended."""
        if self._last != "\n":
            self._put("\n")
        self._kind, self._last = "", "\n"

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def run(
    url: str, api_key: str | None, model: str | None, question: str | None, system: str | None, **sampling: Any
) -> int:
    """One question, or a conversation on the terminal. Returns the exit status: 0, 1 for a failed request, 130 for Ctrl-C.

    sampling: fields of the request that are sent where they are not None.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    try:
        client = OpenAIHttp(url, api_key)
        conversation = Conversation(client, model or client.first_model(), system, given)
        if question is not None:
            return _one_shot(conversation, sys.stdin.read() if question == "-" else question)
        return _converse(conversation, client)
    except ApiError as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has ended; Python must not flush to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _one_shot(conversation: Conversation, question: str) -> int:
    """The answer on stdout, its reasoning on stderr, and tool calls as JSON lines."""
    out, thoughts, answer = Screen(sys.stdout), Screen(sys.stderr), Answer()
    try:
        for kind, text in conversation.ask(question, answer):
            if kind != "tool":
                (thoughts if kind == "reasoning" else out).write(kind, text)
    finally:
        thoughts.end()
        out.end()
    for call in answer.message().get("tool_calls", []):
        print(json.dumps(call))
    return 0


def _converse(conversation: Conversation, client: OpenAIHttp) -> int:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _load_history()
        print(f"{client.base}. /help lists the commands, Ctrl-D ends.")
    screen, status = Screen(sys.stdout), 0
    while (text := _read_message(is_terminal)) is not None:
        if not text:
            continue
        if text.startswith("/"):
            if _is_exit(text, conversation):
                break
            continue
        answer = Answer()
        try:
            for kind, part in conversation.ask(text, answer):
                screen.write(kind, part)
            status = 0
        except KeyboardInterrupt:
            screen.write("content", " [stopped]")
        except ApiError as error:
            screen.end()
            print(f"chat: {error}", file=sys.stderr)
            status = 1
        screen.end()
        if answer.finish_reason == "length":
            print("[the answer ends here because max_tokens or the model's context is reached]", file=sys.stderr)
    return status


def _is_exit(text: str, conversation: Conversation) -> bool:
    """Perform a command. Returns whether it ends the program."""
    command, _, rest = text.partition(" ")
    if command in ("/exit", "/quit"):
        return True
    if command == "/reset":
        conversation.reset(conversation.system)
        print("[new conversation]")
    elif command == "/system":
        conversation.reset(rest.strip() or None)
        print("[system message set, new conversation]" if rest.strip() else "[no system message, new conversation]")
    else:
        if command != "/help":
            print(f"{command}: no such command")
        print(HELP)
    return False


def _read_message(is_terminal: bool) -> str | None:
    """The next message, or None at the end. Lines between two lines of three quotes are one message."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else "> ") if is_terminal else input()
        except EOFError:
            return "\n".join(lines[1:]).strip() or None if lines else None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
            return ""
        if lines:
            if line.strip() == '"""':
                return "\n".join(lines[1:]).strip()
            lines.append(line)
        elif line.strip() == '"""':
            lines.append(line)
        else:
            return line.strip()


def history_file() -> Path:
    """Where the lines of earlier conversations are kept; LLAMA_RAY_HISTORY names another file, empty for none."""
    if (named := os.environ.get("LLAMA_RAY_HISTORY")) is not None:
        return Path(named or os.devnull)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "llama-ray" / "chat_history"


def _load_history() -> None:
    """Read the history, and write it when the program ends. Only this user may read the file."""
    import atexit

    try:
        import readline
    except ImportError:  # Python may be built without it
        return
    path = history_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)

    def save() -> None:
        with suppress(OSError):
            readline.write_history_file(path)

    atexit.register(save)
