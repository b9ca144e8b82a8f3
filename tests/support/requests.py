"""Requests of one prompt, as most tests send them."""

from collections.abc import Coroutine
from typing import Any

from llama_core.scheduling.request import Request, Terms
from llama_core.scheduling.sampling_params import SamplingParams


def submit(engine: Any, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
    """The stream of one prompt. engine: of this process, or a fake. options: other fields of the request, and its terms."""
    (stream,) = now(engine.submit(request_of(prompt, params, **options)))
    return stream


def request_of(prompt: list[int], params: SamplingParams, **options: Any) -> Request:
    """options: other fields of the request, and its terms."""
    terms = Terms(**{name: options.pop(name) for name in ("owner", "priority", "adapter") if name in options})
    return Request([prompt], [params], terms=terms, **options)


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine waits")
