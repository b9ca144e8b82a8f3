"""The clients of a simulated cluster: each asks, of whichever front there is, until it has its whole answer."""

import asyncio
import json
import random
import time
from typing import Any, Final

from llama_core.scheduling.sampling_params import SamplingParams
from tests.simulation.expected_answers import Answer, Wrong
from tests.simulation.history import Event
from tests.simulation.processes import OWNERS, SimulatedFront
from tests.simulation.simulated import Simulated
from tests.support.asgi_client import AsgiCall
from tests.support.fake_ranks import continuation

RETRY_S: Final = 0.5
LATE_S: Final = 0.6  # after its deadline
SCHEMA: Final = {"type": "object", "properties": {"what": {"type": "string"}}}


class Client:
    """Of one completion or chat. key: of its stream, "" for one that begins anew after each fault."""

    def __init__(self, world: Simulated, event: Event, owner: str = "", adapter_share: float | None = None) -> None:
        """adapter_share: the chance of an adapter, where there are any."""
        self._world = world
        draw = random.Random(event.which)
        self.application = world.applications[event.other % len(world.applications)]
        self.name = f"request {event.at_s:g} s {event.which}"
        drawn = OWNERS[min(draw.randrange(5), 2)]
        self.owner = owner or drawn
        share = adapter_share or (0.5 if world.cluster.digests else 0.1)
        self.adapter = draw.choice(world.adapter_names) if draw.random() < share and world.adapter_names else ""
        self.n = draw.choice((1, 1, 1, 2, 3))
        self.is_chat = draw.random() < 0.25
        logprobs = None if self.is_chat else draw.choice((None, 1))
        self.params = SamplingParams(max_tokens=int(event.size), seed=event.which, temperature=1.0, logprobs=logprobs)
        prompt = [1, *(3 + draw.randrange(400) for _ in range(draw.choice((3, 20, 20, 70))))]
        if draw.random() < 0.3:  # a shared beginning
            prompt = [1, *range(3, 40), *prompt[1:4]]
        self.streams = draw.random() < 0.75
        self.has_schema = draw.random() < 0.15
        self.has_tools = self.is_chat and draw.random() < 0.4
        self.key = f"key-{event.at_s}-{event.which}" if self.streams and draw.random() < 0.7 else ""
        self.stop = self._stop_of(prompt) if draw.random() < 0.2 and not self.is_chat else ""
        self.limit_s = draw.choice((3.0, 12.0)) if draw.random() < 0.1 else None
        self._prompt = None if self.is_chat else prompt
        self.answer = self._new_answer()
        self.is_cancelled = False
        self._leaving = asyncio.Event()
        self._away_s = 0.0
        self._num_calls = 0

    def _stop_of(self, prompt: list[int]) -> str:
        tokens = continuation(
            prompt, 30, lambda tokens: self._world.origins(self.application, "")[0].next(tokens, self.params.seed)
        )
        text = self._world.tokenizer.decode(tokens[len(tokens) // 2 :])
        words = [word for word in text.split() if word.isascii() and word.isalpha()]
        return words[0] if words else ""

    def _new_answer(self) -> Answer:
        return Answer(self.n, self._prompt)

    @property
    def model(self) -> str:
        return f"{self.application.model}-{self.adapter}" if self.adapter else self.application.model

    def _body(self) -> dict[str, Any]:
        own = {"messages": [{"role": "user", "content": self.name}]} if self.is_chat else {"prompt": self._prompt}
        body: dict[str, Any] = {
            "model": self.model,
            **own,
            "max_tokens": self.params.max_tokens,
            "seed": self.params.seed,
            "n": self.n,
            "stream": self.streams,
            "return_token_ids": True,
        }
        if self.params.logprobs is not None:
            body["logprobs"] = self.params.logprobs
        if self.stop:
            body["stop"] = self.stop
        if self.has_schema:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        if self.has_tools:
            body["tools"] = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
        if self.streams:
            body["stream_options"] = {"include_usage": True}
        return body

    def _headers(self) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.owner}"}
        if self.key:
            headers["idempotency-key"] = self.key
        if self.answer.last_id:
            headers["last-event-id"] = self.answer.last_id
        if self.limit_s is not None:
            headers["x-request-timeout-seconds"] = str(self.limit_s)
        return headers

    async def ask(self) -> None:
        while not self.is_cancelled:
            if fronts := self._world.open_fronts():
                self._num_calls += 1
                front = fronts[(self.params.seed + self._num_calls) % len(fronts)]
                if await self._is_answered(front):
                    return
            await asyncio.sleep(self._away_s or RETRY_S)
            self._away_s = 0.0

    def leave(self, seconds: float) -> None:
        """Disconnect, and come back later."""
        self._away_s = seconds
        self._leaving.set()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._leaving.set()

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.answer.choices)

    async def _is_answered(self, front: SimulatedFront) -> bool:
        """Whether this front has given the rest of the answer."""
        self._leaving.clear()
        if not self.answer.last_id:
            self.answer = self._new_answer()
        origins = self._world.origins(self.application, self.adapter)
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        body, headers = self._body(), self._headers()
        began_s = time.monotonic()
        call = front.process.call(lambda: AsgiCall(front.http_app, path, body, headers))
        ends = [asyncio.ensure_future(event.wait()) for event in (front.ended, self._leaving)]
        try:
            await asyncio.wait((call._task, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if not call.ended:
            call._left.set()
        if self.is_cancelled:
            return True
        if self.limit_s is not None and not front.is_gone:
            self._world.check_deadline(front, time.monotonic() - began_s, self.limit_s)
        later = self._world.origins(self.application, self.adapter)
        origins += [own for own in later if own not in origins]
        try:
            return self._read(front, call, origins)
        except Wrong as wrong:
            raise Wrong(f"{self.name}: {wrong}") from None

    def _read(self, front: SimulatedFront, call: AsgiCall, origins: list[Any]) -> bool:
        answer = self.answer
        if call.status not in (0, 200):
            return self._is_refused(front, call)
        if not self.streams:
            if not (call.ended and call.complete):
                return False
            answer.read_body(json.loads(call.body))
            answer.is_done = True
        else:
            answer.read(call.events)
        error, answer.error = answer.error, None
        if error is not None:
            answer.is_done = False
            if self._gives_up(front, error):
                return True
        elif call.complete and not answer.is_done:
            raise Wrong("a stream ends without [DONE] and without an error")
        answer.check(self.params, origins, self._world.tokenizer, self.stop, is_whole=answer.is_done)
        return answer.is_done

    def _is_refused(self, front: SimulatedFront, call: AsgiCall) -> bool:
        """Whether the client gives up."""
        if not call.ended:
            return False
        error = call.error()
        if call.status == 409 and error.get("code") == "answer_changed":
            if not self._world.changes - (set() if self.adapter else {"adapter", "no adapter"}):
                raise Wrong(f"409 although nothing has changed: {error}")
            self.answer = self._new_answer()
            return False
        if call.status == 429:
            return False
        if call.status == 404:
            if not self.adapter and self._world.serves(front, self.application):
                raise Wrong("404 for a model that is served")
            return bool(self.adapter)
        return self._gives_up(front, error)

    def _gives_up(self, front: SimulatedFront, error: dict[str, Any]) -> bool:
        """Whether an error ends the request; else the client asks again. Raises Wrong for one that must not be."""
        code, message = str(error.get("code")), str(error.get("message"))
        if "limit of this request" in message and self.limit_s is not None:
            return True
        if code == "not_ready" or "shut down" in message or "not ready" in message:
            is_wrong = self._world.serves(front, self.application) and not front.is_draining and not self.adapter
            # An update may leave no engine for an answer, or a prompt, of the former release.
            may_have_begun = self.num_tokens > 0 or self.n > 1 or not self.streams
            may_have_changed = "hold_timeout_s" in message and self.application.has_updated and may_have_begun
            may_have_changed |= "send it again" in message and (not self.num_tokens or self.n > 1)
            # A front that starts beside a rival may meet that first.
            is_removed = "has been removed" in message or "no engine is connected" in message
            may_have_changed |= is_removed and self.application.has_had_rivals
            if is_wrong and not may_have_changed:
                raise Wrong(f"refused beside an engine that serves: {message}")
            return False
        # It has given way to another owner's, or the client is back already.
        if code in ("queue_full", "stream_taken_over"):
            return False
        if "adapter is not here" in message:
            if self.num_tokens and not self._world.num_ends:
                raise Wrong("a stream is lost with its adapter, and no engine has died")
            return True
        if "engines ended in turn" in message or code == "poison_request":
            if self._world.num_ends < 3:
                raise Wrong(f"a request is to blame for {self._world.num_ends} faults: {message}")
            return True
        raise Wrong(f"{error}")
