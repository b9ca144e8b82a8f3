"""The messages between a front and an engine: frames of MessagePack, checked against their types while they are decoded.

A front sends `Hello`, then `Submit`, `Continue` and `Cancel`. An engine sends `Welcome`, then one `Step` for each step that
gave tokens to streams of this front, `Beat` every BEAT_S, and `Goodbye` before it ends. Streams have numbers, which the
front chooses and never uses again on a connection.
"""

from typing import Final, TypeVar

import msgspec

from cluster.wire.messages import UNREADABLE, WireError
from deployments.engine.interface import EngineState, SamplingDefaults
from deployments.fleet.model_files import ModelFiles
from llama_core.errors import LlamaError, QueueFull, error_classes
from llama_core.scheduling.request import FinishReason, Request, TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams

PROTOCOL: Final = 1  # two sides whose numbers differ by more than 1 do not work together
BEAT_S: Final = 0.5


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """secret: the engine's, which a Ray call has carried to the front. has_files: digests of model files that the front has."""

    protocol: int
    secret: bytes
    has_files: tuple[str, ...] = ()


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new request, whose choices are the streams first, first + 1, ... The answer is `Accepted` or `Refused`."""

    first: int
    request: Request
    request_id: str


class Continue(msgspec.Struct, frozen=True, array_like=True, tag="continue"):
    """A stream that another engine had. output: its tokens so far.

    has_prompt_logprobs: the front has all of them. num_failures: engines that have ended while they computed its next token.
    has_begun: it goes ahead of the queue; another one waits its turn. is_readmitted: its client was away, so it is refused
    where a new request would be.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    output: list[int]
    owner: str
    priority: int
    cache_scope: str
    request_id: str
    has_prompt_logprobs: bool
    num_failures: int
    has_begun: bool = True
    is_readmitted: bool = False
    adapter: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody reads these streams any more. is_stop: their texts have reached a stop string."""

    numbers: list[int]
    is_stop: bool = False


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """engine: its id, of one life of its process. numerics: engines with the same text compute the same bits. files: None where
    the front has them. adapters: digests of LoRA adapters by name. adapter_digests: of those too that have no name any more.
    An engine sends it again when its adapters change."""

    protocol: int
    engine: str
    numerics: str
    files_digest: str
    files: ModelFiles | None
    state: EngineState
    defaults: SamplingDefaults
    adapters: dict[str, str] = {}
    adapter_digests: list[str] = []


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error of the tree in `llama_core.errors`."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float = 0.0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    first: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Of a `Submit` or a `Continue`."""

    first: int
    fault: Fault


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """What a stream has gained beside tokens. prompt_logprobs: from index `prompt_start` on. num_cached: with the first
    tokens."""

    number: int
    logprobs: list[TokenLogprob] = []
    prompt_start: int = 0
    prompt_logprobs: list[TokenLogprob] = []
    num_cached: int | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    fault: Fault | None = None


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one step gave to this front's streams, or what the next one begins. tokens: of each of `numbers`. admitted: to the
    batch, and after how many seconds in the queue."""

    elapsed_ms: float
    numbers: list[int]
    tokens: list[list[int]]
    details: list[Detail]
    running: int
    waiting: int
    admitted: list[tuple[int, float]] = []


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """cached, evicted: shortened hashes of the prefixes that the engine's cache has gained and lost since the last one.
    is_whole: it holds `cached` and no other."""

    state: EngineState
    defaults: SamplingDefaults
    cached: list[bytes] = []
    evicted: list[bytes] = []
    is_whole: bool = False


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The engine ends. has_successor: one that computes the same bits is to start in its place."""

    has_successor: bool


Message = TypeVar("Message")

FromFront = Submit | Continue | Cancel
FromEngine = Welcome | Accepted | Refused | Step | Beat | Goodbye

_decode_hello = msgspec.msgpack.Decoder(Hello)
_decode_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_decode_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def decode_hello(payload: bytes) -> Hello:
    """Raises WireError."""
    return _decoded(_decode_hello, payload)


def decode_from_front(payload: bytes) -> FromFront:
    """Raises WireError."""
    return _decoded(_decode_from_front, payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Raises WireError."""
    return _decoded(_decode_from_engine, payload)


def works_with(protocol: int) -> bool:
    """Whether the other side's version is at most one apart."""
    return abs(protocol - PROTOCOL) <= 1


def fault_of(error: LlamaError) -> Fault:
    return Fault(error.code, error.message, error.param, getattr(error, "retry_after_s", 0.0))


def error_of(fault: Fault) -> LlamaError:
    kind = error_classes().get(fault.code, LlamaError)  # of a newer version: of the request alone
    error = kind(fault.message, param=fault.param)
    if isinstance(error, QueueFull):
        error.retry_after_s = fault.retry_after_s
    return error


def _decoded(decoder: msgspec.msgpack.Decoder[Message], payload: bytes) -> Message:
    try:
        return decoder.decode(payload)
    except UNREADABLE as error:
        raise WireError(f"not a message of this protocol: {error}") from None
