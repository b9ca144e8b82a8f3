"""The messages between a front and an engine: frames of MessagePack, checked against their types while they are decoded.

A front sends `Hello`, then `Submit`, `Continue` and `Cancel`, and `Alive` every BEAT_S. An engine sends `Welcome`, then one
`Step` for each step that gave tokens to streams of this front, and one in LOAD_S for a load that other fronts have changed;
`Beat` every BEAT_S, and `Goodbye` before it ends. Streams have the numbers 1, 2, ... of a connection in the order in which the
front sends them.

A new field stands at the end of its message and has a default, so that a message of the former protocol can be read.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from cluster.wire.messages import decoder
from deployments.engine.interface import EngineState, SamplingDefaults
from deployments.links.model_files import ModelFiles
from llama_core.errors import LlamaError, QueueFull, error_classes
from llama_core.scheduling.request import FinishReason, Request, Terms, TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step_costs import CostModel

PROTOCOL: Final = 6  # two sides whose numbers differ by more than 1 do not work together
BEAT_S: Final = 0.5
LOAD_S: Final = 0.05
CLOSE_AFTER_S: Final = 15.0  # of the other side's silence
MAX_UNREAD_BYTES: Final = 64 * 2**20  # for the other side to read
# Streams of one front at most, in sequences that the engine can take; others have ended elsewhere.
TIMES_CAPACITY: Final = 8


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """secret: the engine's, which a Ray call has carried to the front. has_files: digests of model files that the front has."""

    protocol: int
    secret: bytes
    has_files: tuple[str, ...] = ()


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new request, whose choices are the streams number, number + 1, ... The answer is `Accepted` or `Refused`.
    num_expected: of each stream, the tokens that the engine has to compute, as far as the front knows its cache."""

    number: int
    request: Request
    num_expected: list[int] = []


class Continue(msgspec.Struct, frozen=True, array_like=True, tag="continue"):
    """A stream that another engine had. output: its tokens so far.

    has_prompt_logprobs: the front has all of them. num_failures: engines that have ended while they computed its next token.
    has_begun: it goes ahead of the queue; another one waits its turn. is_readmitted: its client was away, so it is refused
    where a new request would be. num_expected: as of `Submit`.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    output: list[int]
    terms: Terms
    has_prompt_logprobs: bool
    num_failures: int
    has_begun: bool = True
    is_readmitted: bool = False
    num_expected: int = 0


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody reads these streams any more. is_stop: their texts have reached a stop string."""

    numbers: list[int]
    is_stop: bool = False


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The front's process runs. held: its streams of this engine's model that no engine has, with so many tokens."""

    held: int = 0
    held_tokens: int = 0


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """engine: its id, of one life of its process. numerics: engines with the same text compute the same bits. files: None where
    the front has them. adapters: digests of LoRA adapters by name. adapter_digests: of those too that have no name any more.
    tokenizer_digest: of what decides the tokens of a text. An engine sends it again when its adapters
    change."""

    protocol: int
    engine: str
    numerics: str
    files_digest: str
    files: ModelFiles | None
    state: EngineState
    defaults: SamplingDefaults
    adapters: dict[str, str] = {}
    adapter_digests: list[str] = []
    tokenizer_digest: str = ""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error of the tree in `llama_core.errors`."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float = 0.0


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    number: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Of a `Submit` or a `Continue`."""

    number: int
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
    embedding: bytes | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Of an engine. received: the highest number of the front's streams that the rest includes. running, waiting: sequences,
    without background ones that wait. queued_tokens: of their prompts, to be computed."""

    received: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one step gave to this front's streams, what the next one begins, or a changed load alone. tokens: of each of
    `numbers`. admitted: to the batch, and after how many seconds in the queue."""

    load: Load
    elapsed_ms: float = 0.0
    numbers: list[int] = []
    tokens: list[list[int]] = []
    details: list[Detail] = []
    admitted: list[tuple[int, float]] = []


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """cached, evicted: shortened hashes of the prefixes that the engine's cache has gained and lost since the last one.
    is_whole: it holds `cached` and no other. num_fronts: that the engine serves. unheard_s: since it has heard this front.
    queued: numbers of the front's streams that have no slot. costs: of its steps. places: digests of the adapters in them."""

    state: EngineState
    defaults: SamplingDefaults
    load: Load = Load()
    cached: list[bytes] = []
    evicted: list[bytes] = []
    is_whole: bool = False
    num_fronts: int = 1
    unheard_s: float = 0.0
    queued: list[int] = []
    costs: CostModel = CostModel()
    places: list[str] = []


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The engine ends. has_successor: one that computes the same bits is to start in its place."""

    has_successor: bool


FromFront = Submit | Continue | Cancel | Alive
FromEngine = Welcome | Accepted | Refused | Step | Beat | Goodbye

decode_hello: Callable[[bytes], Hello] = decoder(Hello, "a greeting")
decode_from_front: Callable[[bytes], FromFront] = decoder(FromFront, "a message of this protocol")
decode_from_engine: Callable[[bytes], FromEngine] = decoder(FromEngine, "a message of this protocol")


def knows_all_of(message: FromFront, payload: bytes) -> bool:
    """Whether no field of the frame has been dropped: a later version may send one, such as a sampling parameter."""
    if msgspec.msgpack.encode(message) == payload:
        return True
    return _has_all(msgspec.to_builtins(message), msgspec.msgpack.decode(payload, strict=False))


def _has_all(known: Any, sent: Any) -> bool:
    if isinstance(sent, dict):
        return all(name in known and _has_all(known[name], value) for name, value in sent.items())
    if isinstance(sent, list) and sent and not isinstance(sent[0], int):  # not of tokens
        return len(sent) <= len(known) and all(map(_has_all, known, sent))
    return True


def works_with(protocol: int) -> bool:
    """Whether the other side's version is at most one apart."""
    return abs(protocol - PROTOCOL) <= 1


def max_streams(max_batch_size: int, max_queue: int) -> int:
    """Of one front at one engine."""
    return TIMES_CAPACITY * (max_batch_size + max_queue)


def fault_of(error: LlamaError) -> Fault:
    return Fault(error.code, error.message, error.param, getattr(error, "retry_after_s", 0.0))


def error_of(fault: Fault) -> LlamaError:
    kind = error_classes().get(fault.code, LlamaError)  # of a newer version: of the request alone
    error = kind(fault.message, param=fault.param)
    if isinstance(error, QueueFull):
        error.retry_after_s = fault.retry_after_s
    return error
