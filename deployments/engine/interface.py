"""The interface between the HTTP layer and the engine: HTTP can be tested without Ray or a model.

Knows nothing of HTTP, Ray or tensors. `ModelView` implements `Engine`; `Fleet` and `OwnEngine` implement `Models`. The tests
have a fake.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Final, Protocol

from deployments.engine.sequence_stream import SequenceStream
from llama_core.errors import NotReady
from llama_core.files.sentence_transformers import EmbeddingForm
from llama_core.rank_report import RankReport
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.chat_format import ChatFormat
from llama_core.text.tokenizers.tokenizer import Tokenizer

# Of a front: streams that changed engines, streams that had none, held streams that ended so, engines that fell silent.
FLEET_EVENTS: Final = ("moved", "held", "hold_timeout", "suspected")
_META = SamplingParams()  # Meta's reference's values


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters of a request that names none. `SamplingParams` has their ranges."""

    temperature: float = _META.temperature
    top_p: float = _META.top_p
    top_k: int = _META.top_k
    min_p: float = _META.min_p
    repetition_penalty: float = _META.repetition_penalty


@dataclass(frozen=True, slots=True)
class RankState:
    """What GET /props shows of a `RankReport`. load_seconds: with rendezvous and imports."""

    rank: int
    node: str
    pid: int
    device: str
    dtype: str
    weight_bytes: int
    load_seconds: float
    share: str

    @classmethod
    def of(cls, report: RankReport) -> "RankState":
        shown = {field.name: getattr(report, field.name) for field in fields(cls)}
        return cls(**shown | {"load_seconds": round(report.start_seconds, 3)})


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """One engine. node: IP address of rank 0's node. requests: taken since its start. Of a front: the streams that it has
    there, the requests and streams that the engine has refused, and the time since it was heard."""

    id: str
    model: str
    node: str
    phase: str
    requests: int
    requests_running: int
    requests_waiting: int
    streams: int = 0
    refusals: int = 0
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream of a front. engine: the id; "" while it is held. phase: held, waiting (in the engine's queue) or running."""

    request_id: str
    engine: str
    phase: str
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """The fields of GET /props: the model, its ranks, the limits, and the load of cache and queues. The defaults are those of
    a front without a model."""

    model: str = ""
    phase: str = "loading"
    world_size: int = 0
    epoch: int = 0
    ranks: tuple[RankState, ...] = ()
    spare_ranks_ready: int = 0
    max_seq_len: int = 0
    max_seq_len_reason: str = ""
    max_batch_size: int = 0
    max_step_tokens: int = 0
    max_queue: int = 0
    max_queue_tokens: int = 0
    block_size: int = 0
    checkpoint_digest: str = ""  # SHA-256 of all files; "" until ranks have loaded them
    checkpoint_format: str = "meta"  # as in `checkpoint.registry.FORMATS`
    stop_tokens: tuple[str, ...] = ()  # texts of the ids that end a generation
    chat_format: str = "llama2"
    tool_format: str = "llama2"
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    window: int = 0  # tokens that a position reads; 0: all before it
    blocks_total: int = 0
    blocks_used: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    preemptions: int = 0
    prefix_cache_hit_tokens: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    engines: tuple[EngineSummary, ...] = ()  # that this process uses
    fleet_events: dict[str, int] = field(default_factory=dict)  # of a front: how many of each of FLEET_EVENTS
    streams: tuple[StreamState, ...] = ()  # of a front
    checkpoint: str = ""  # of a remote model, its name with the revision
    detail: str = ""  # of a phase that is not ready, a sentence
    background_waiting: int = 0  # of those that wait, sequences of the priority that runs while there are no others
    embedding: EmbeddingForm = field(default_factory=EmbeddingForm)  # of a request that does not say otherwise


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests are served now. phase: fetching, loading, ready, sleeping, recovering, draining or
    failed. detail: a sentence."""

    ready: bool
    phase: str
    detail: str = ""
    retry_after_s: float = 2.0

    @property
    def takes_requests(self) -> bool:
        """While ranks recover, requests wait for them."""
        return self.ready or self.phase == "recovering"

    def not_ready(self) -> NotReady:
        """The error for a request that cannot be taken now, with the reason and the time to retry."""
        detail = f"The server is not ready ({self.phase}). {self.detail}".strip()
        return NotReady(detail, retry_after_s=self.retry_after_s)


class Engine(Protocol):
    """What computes the requests of one model, or of an adapter under a name of its own, as the HTTP layer uses it."""

    @property
    def model_id(self) -> str: ...
    @property
    def adapter(self) -> str:
        """The digest of the LoRA adapter; "" for none."""

    @property
    def parent(self) -> str | None:
        """The adapter's base model."""

    @property
    def max_seq_len(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_request_tokens(self) -> int:
        """Prompt tokens that all sequences of one request may have together: an idle engine could not take
        more."""

    @property
    def chat_format(self) -> ChatFormat: ...
    @property
    def answer_format(self) -> AnswerFormat: ...
    @property
    def served_numerics(self) -> Set[str]:
        """Of the engines that run now: those with equal ones compute the same bits. Empty where none does."""

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...
    def cache_scope(self, owner: str) -> str:
        """Which requests may share what the server computes and keeps: those of equal scopes, of at most 32 characters."""

    def check_capacity(self, owner: str = "") -> None:
        """As of `Models`."""

    async def submit(self, request: Request, *, is_timed: bool = False, numerics: str = "") -> Sequence[SequenceStream]:
        """Queue every choice of the request or none. is_timed: measure the times of a trace. numerics: of the engine that is to
        compute them; "" for any.

        Raises QueueFull, NotReady, ContextLengthExceeded, or InvalidParameter if no idle server could take so many.
        """

    async def readmit(self, streams: Sequence[SequenceStream], *, is_timed: bool = False) -> None:
        """Queue again, all or none, a request's suspended streams that have not ended. They are computed again from their
        tokens, and go on as if they had not been suspended. All streams can be read again, from their first tokens on.
        Raises QueueFull or NotReady."""

    def next_seed(self) -> int:
        """An int64 for a request that names none; never the same twice in a row."""

    def describe(self) -> EngineState: ...


class Models(Protocol):
    """All that this process serves."""

    @property
    def models(self) -> Mapping[str, Engine]:
        """By their names, and by those of their adapters."""

    @property
    def model_id(self) -> str:
        """Of a request that names none. Raises NotReady before there is one."""

    @property
    def asleep(self) -> Set[str]:
        """Names of models that have no engine, because nobody uses them, and get one on a request."""

    async def meet_model(self, model: str | None) -> None:
        """Return when `models` has this one. One that sleeps, and that this process has not seen, is woken. Raises NotReady if
        that takes too long, or QueueFull."""

    def readiness(self) -> Readiness: ...
    def live(self) -> bool:
        """False when only a restart helps."""

    def check_capacity(self, owner: str = "") -> None:
        """Raises NotReady if no request is taken now, or QueueFull if not even one sequence of `owner` may wait. Call it
        before a body is parsed."""

    def describe(self) -> EngineState: ...
