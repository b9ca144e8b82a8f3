"""What an answer is computed from, as a short hash in the ids of its events: a stream never goes on as another answer."""

from array import array
from collections.abc import Iterable
from dataclasses import fields
from hashlib import blake2b

from deployments.engine.interface import Engine
from deployments.openai.errors import AnswerChanged
from deployments.openai.plan import Plan

HASH_BYTES = 8


def changed() -> AnswerChanged:
    return AnswerChanged(
        "Last-Event-ID: the rest of that answer cannot be computed any more: weights, adapter, chat template, defaults or API"
        " key have changed; drop what you have of it, and send the request without Last-Event-ID",
        param="Last-Event-ID",
    )


class Fingerprint:
    """began_s: the time that chat templates read, in seconds since 1970."""

    def __init__(self, began_s: int, digest: bytes, engine: Engine, plan: Plan) -> None:
        """digest: of the body and the API key. A parameter that has its default value changes nothing, so that fronts of
        another version agree."""
        base = blake2b(digest)
        base.update(repr((engine.adapter, sorted(plan.request.shown_tokens))).encode())
        for prompt, params in zip(plan.request.prompts, plan.request.params, strict=True):
            own = {each.name: value for each in fields(params) if (value := getattr(params, each.name)) != each.default}
            base.update(array("i", prompt).tobytes() + repr(own).encode("utf-8", "surrogatepass"))
        self.began_s, self._base = began_s, base.digest()

    def of(self, numerics: Iterable[str]) -> str:
        """numerics: of the engines that computed the tokens so far."""
        return blake2b(b"\0".join([self._base, *map(str.encode, sorted(numerics))]), digest_size=HASH_BYTES).hexdigest()

    def stamp(self, numerics: Iterable[str]) -> str:
        """The end of an event's id."""
        return f"~{self.began_s:x}~{self.of(numerics)}"
