"""Requests of one prompt, as most tests send them."""

import inspect
from collections.abc import Coroutine
from typing import Any

from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams


def submit(engine: Any, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
    """The stream of one prompt. engine: a service, a loop, or a fake. options: other fields of the request."""
    submitted = engine.submit(Request([prompt], [params], **options))
    (stream,) = now(submitted) if inspect.iscoroutine(submitted) else submitted
    return stream


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine waits")
