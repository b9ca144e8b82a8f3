"""Every error that users of this project can get, as one tree.

    LlamaError
    ├── InvalidRequest (ValueError)       the caller's mistake; the engine computed nothing
    │   ├── InvalidParameter              one field out of its range or of the wrong type
    │   ├── InvalidDialog                 wrong order of roles; names the message's index
    │   │   └── SpecialTags               a message contains the chat template's own tags
    │   ├── NoChatTemplate                a chat with a model that has no chat template
    │   └── ContextLengthExceeded         prompt exceeds the context
    ├── ConfigError (ValueError)          params.json or an argument of the server
    ├── CheckpointError                   a file that is missing, damaged or of another model
    │   └── FetchError                    a remote model that cannot be had, or is refused before it is fetched
    │       ├── Unreachable               the network, the hub or the store is away; a later try may help
    │       └── DamagedDownload           a file has not the SHA-256 that its hub publishes; it has been removed
    ├── TokenizerError                    a tokenizer that is missing, damaged or of another model
    └── EngineError                       the request was valid, the engine could not serve it
        ├── QueueFull                     the queue is full; has the time to try again
        ├── NotReady                      the server is loading or draining
        ├── RequestCancelled              the client disconnected
        │   └── RequestAborted            it was ended by its id
        ├── DeadlineExceeded              the request's time limit has passed
        │   └── CallersDeadlineExceeded   the caller itself set the limit
        ├── NonFiniteLogits               the model computed NaN or infinity for this request
        ├── PoisonRequest                 the ranks failed repeatedly with this request in the step
        ├── CheckpointChanged             new ranks found another checkpoint than the first ranks loaded
        └── RankFailure                   a rank died, hung or raised

Messages name the field and the limit, and never repeat the caller's input. Every error can be pickled, because Ray sends it
from a replica to the caller of its handle.
"""

from typing import Self


class LlamaError(Exception):
    """Base of the tree. `param`: the field at fault. `code`: the `code` field of OpenAI's error body."""

    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of(cls, param: str, problem: str) -> Self:
        """About one field, with whose name the message begins."""
        return cls(f"{param}: {problem}", param=param)

    @property
    def message(self) -> str:
        return str(self.args[0])


class InvalidRequest(LlamaError, ValueError):
    code = "invalid_request"


class InvalidParameter(InvalidRequest):
    code = "invalid_parameter"


class InvalidDialog(InvalidRequest):
    """`index`: the message's position in the dialog, from 0; None if the dialog as a whole is at fault."""

    code = "invalid_dialog"

    def __init__(self, message: str, *, index: int | None = None, param: str | None = "messages") -> None:
        super().__init__(message, param=param)
        self.index = index


class SpecialTags(InvalidDialog):
    code = "special_tags"


class NoChatTemplate(InvalidRequest):
    code = "no_chat_template"


class NoTokenAllowed(InvalidRequest):
    """The rules of a request leave no token to sample: its lists of tokens contradict each other, or its grammar is too
    complex."""

    code = "no_token_allowed"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ConfigError(LlamaError, ValueError):
    code = "invalid_config"


class CheckpointError(LlamaError):
    code = "invalid_checkpoint"


class FetchError(CheckpointError):
    pass


class Unreachable(FetchError):
    pass


class DamagedDownload(FetchError):
    pass


class TokenizerError(LlamaError):
    code = "invalid_tokenizer"


class EngineError(LlamaError):
    code = "engine_error"


class QueueFull(EngineError):
    """`retry_after_s`: seconds after which the caller should try again."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class NotReady(EngineError):
    """`retry_after_s`: seconds after which the caller should try again."""

    code = "not_ready"

    def __init__(self, message: str, *, retry_after_s: float = 2.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RequestCancelled(EngineError):
    code = "request_cancelled"


class RequestAborted(RequestCancelled):
    code = "request_aborted"


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"


class CallersDeadlineExceeded(DeadlineExceeded):
    pass


class NonFiniteLogits(EngineError):
    code = "non_finite_logits"


class PoisonRequest(EngineError):
    code = "poison_request"


class CheckpointChanged(EngineError):
    """Replacement ranks found another checkpoint than the first ranks loaded."""

    code = "checkpoint_changed"


class RankFailure(EngineError):
    """`rank`: the first rank seen to fail; None if the group as a whole did not start.

    `raised`: the rank reported an exception, which the content of the step may have caused. If a rank died or hangs instead,
    the cause may lie outside the server.
    """

    code = "rank_failure"

    def __init__(
        self, message: str, *, rank: int | None = None, raised: bool = False, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.rank = rank
        self.raised = raised

    def again(self) -> "RankFailure":
        """A copy to raise again: an exception that is raised twice collects both tracebacks."""
        return RankFailure(self.message, rank=self.rank, raised=self.raised, param=self.param)


def error_classes(kind: type[LlamaError] = LlamaError) -> dict[str, type[LlamaError]]:
    """The classes of the tree by code; of classes with one code, the one nearest to the root."""
    below = [error_classes(child) for child in kind.__subclasses__()]
    return {code: each for classes in below for code, each in classes.items()} | {kind.code: kind}
