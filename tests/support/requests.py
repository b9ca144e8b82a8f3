"""Requests of one prompt, as most tests send them."""

from typing import Any

from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams


def submit(engine: Any, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
    """The stream of one prompt. engine: a service, a loop, or a fake. options: other fields of the request."""
    (stream,) = engine.submit(Request([prompt], [params], **options))
    return stream
