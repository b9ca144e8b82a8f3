"""One captured request: what was asked, the tokens that were answered, and what they depend on.

The file has the prompt and the answer as they are.
"""

import time
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.requests import Request

from deployments.engine.interface import Delta, Engine
from deployments.http.answer import LeadingSpace
from deployments.http.capture.environment import cpu, model_facts, settings, versions
from deployments.http.capture.folder import CaptureFolder
from deployments.http.choices import Choices
from deployments.http.errors import CaptureNotAllowed, as_llama_error
from deployments.http.plan import Plan
from llama_core.errors import InvalidParameter

HEADER: Final = "X-Capture"
_NAME: Final = HEADER.lower()
VERSION: Final = 1  # of the file's form
_OFF: Final = ("", "0", "false")
_ON: Final = ("1", "true")


@dataclass(slots=True)
class CapturedChoice:
    """logprobs: of each token, if the request asks for them."""

    prompt: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)


class Capture:
    """Follows one request; `close` writes the file."""

    def __init__(self, folder: CaptureFolder, route: str, body: bytes, request_id: str, owner: str) -> None:
        self._folder, self._route, self._body = folder, route, body
        self._request_id, self._owner = request_id, owner
        self._began_s = time.time()
        self._engine: Engine | None = None
        self._plan: Plan | None = None
        self._choices: list[CapturedChoice] = []
        self._spaces: list[LeadingSpace] = []  # by choice

    def submitted(self, engine: Engine, plan: Plan) -> None:
        self._engine, self._plan = engine, plan
        self._choices = [
            CapturedChoice(number // plan.n, params.seed) for number, (_, params) in enumerate(plan.choices())
        ]
        self._spaces = [
            LeadingSpace(engine.tokenizer, prompt, continues_prompt=plan.continues_prompt)
            for prompt, _ in plan.choices()
        ]

    def add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.tokens += delta.tokens
        choice.text += self._spaces[index].spaced(delta)
        choice.finish_reason = delta.finish_reason
        choice.logprobs += [entry.logprob for entry in delta.logprobs]

    def close(self, error: BaseException | None) -> None:
        """The request has ended. Nothing is written of one that was refused before it was submitted."""
        if self._plan is not None and self._engine is not None:
            content = msgspec.json.encode(self._described(self._engine, self._plan, error))
            self._folder.write(self._owner, self._request_id, content)

    def _described(self, engine: Engine, plan: Plan, error: BaseException | None) -> dict[str, Any]:
        state = engine.describe()
        complete = all(choice.finish_reason is not None for choice in self._choices)
        outcome = "complete" if complete else "cut" if error is None else as_llama_error(error).code
        return {
            "capture": VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began_s)),
            "request_id": self._request_id,
            "route": self._route,
            "body": msgspec.Raw(self._body.removeprefix(BOM_UTF8)),
            "seed": plan.params[0].seed,
            "prompts": plan.prompts,
            "choices": self._choices,
            "outcome": outcome,
            "model": model_facts(state),
            "versions": versions(),
            "settings": settings(state),
            "cpu": cpu(),
        }


class CapturedChoices(Choices):
    """Choices whose deltas a capture takes too."""

    def __init__(self, engine: Engine, plan: Plan, capture: Capture, *, is_timed: bool = False) -> None:
        super().__init__(engine, plan, is_timed=is_timed)
        self._capture = capture
        capture.submitted(engine, plan)

    def take(self) -> tuple[int, Delta] | None:
        taken = super().take()
        if taken is not None:
            self._capture.add(*taken)
        return taken


def asks_for_capture(headers: Mapping[str, str]) -> bool:
    """headers: by names in lower case. Raises InvalidParameter for a header that says neither yes nor no."""
    given = headers.get(_NAME)
    if given is None:
        return False
    asked = given.strip().lower()
    if asked not in (*_OFF, *_ON):
        raise InvalidParameter(f"{HEADER}: must be 1 or 0", param=HEADER)
    return asked in _ON


async def begin_capture(folder: CaptureFolder | None, route: str, body: bytes, request: Request) -> Capture:
    """Raises CaptureNotAllowed where the server stores none."""
    if folder is None:
        raise CaptureNotAllowed(
            f"{HEADER}: this server stores no requests; its operator can allow it with the argument capture_dir",
            param=HEADER,
        )
    await folder.check_space()
    state = request.scope["state"]
    return Capture(folder, route, body, state["request_id"], state.get("owner", ""))
