"""Requests of every kind."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

TALE = "once upon a time there was a little red dog who liked to sing and play with a big blue ball in the garden"
KINDS = (
    *("greedy", "seeded", "logprobs", "stop", "two choices", "whole", "chat", "schema", "penalties", "cut"),
    "tool call",
)
# An answer that no limit of tokens in these tests completes: it must be followed for as long as the stream lives.
LONG_LIST = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    },
}
# A short one, because its schema is part of the prompt.
NUMBERS = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 1}}}
TOOL = {"type": "function", "function": {"name": "play", "parameters": NUMBERS | {"required": ["n"]}}}


@dataclass(frozen=True)
class Ask:
    """One request; `path` and `body` as sent."""

    kind: str
    path: str
    body: dict[str, Any]


def asks(
    count: int, model: str, max_tokens: int, seed: int = 0, kinds: Sequence[str] = KINDS, adapters: Sequence[str] = ()
) -> list[Ask]:
    """Requests of the kinds in turn, with different prompts. adapters: models of those of the kind adapter, in turn."""
    draw, next_adapter = random.Random(seed), cycle(adapters)
    result = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        prompt = " ".join(draw.choices(TALE.split(), k=draw.randint(4, 40)))
        body: dict[str, Any] = {"model": model, "max_tokens": draw.randint(max_tokens // 2, max_tokens), "stream": True}
        body |= {"temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        path = "/v1/completions"
        if kind == "adapter":
            body |= {"model": next(next_adapter)}
        if kind in ("seeded", "two choices", "four choices", "cut"):
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": draw.randrange(2**31)}
        if kind == "logprobs":
            body |= {"logprobs": 2}
        if kind == "stop":
            body |= {"stop": [" and ", "dog"]}
        if kind in ("two choices", "cut"):
            body |= {"n": 2}
        if kind == "four choices":
            body |= {"n": 4}
        if kind in ("schema", "tool call"):
            del body["ignore_eos"]  # an answer with a grammar ends where the grammar does
            body |= {"temperature": 1.0, "seed": draw.randrange(2**31)}
        if kind == "schema":
            body |= {"structured_outputs": {"json": LONG_LIST}}
        if kind == "tool call":
            prompt = " ".join(prompt.split()[:6])  # the tool's description is longer
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": min(body["max_tokens"], 100)}
        if kind == "penalties":
            body |= {"temperature": 0.8, "seed": draw.randrange(2**31), "repetition_penalty": 1.3, "min_p": 0.02}
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"300": -5}, "bad_words": ["dog"]}
        if kind == "whole":
            body |= {"stream": False}
            del body["stream_options"]
        if kind in ("chat", "tool call"):
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": prompt}]}
        else:
            body |= {"prompt": prompt}
        result.append(Ask(kind, path, body))
    return result
