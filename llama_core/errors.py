"""Every error that a user of this project can meet, as one tree.

    LlamaError
    ├── InvalidRequest (ValueError)       the caller's mistake; nothing was computed
    │   ├── InvalidParameter              one field out of its range or of the wrong type
    │   ├── InvalidDialog                 roles out of order; names the message's index
    │   │   └── SpecialTags               the chat template's own tags inside a message
    │   └── ContextLengthExceeded         prompt, or prompt + max tokens, over the context
    ├── ConfigError (ValueError)          params.json or an argument of the server
    ├── CheckpointError                   a shard that is missing, damaged or of another model
    ├── TokenizerError                    a tokenizer that is missing, damaged or of another model
    └── EngineError                       the request was fine, the engine could not serve it
        ├── QueueFull                     too much waits already; says when to come back
        ├── NotReady                      still loading, or draining
        ├── RequestCancelled              the caller went away
        ├── DeadlineExceeded              the time that the caller allowed is over
        ├── NonFiniteLogits               the model computed NaN or infinity for this request
        ├── PoisonRequest                 the ranks failed again and again with this request in the step
        ├── CheckpointChanged             new ranks found other files than the first ranks loaded
        └── RankFailure                   a rank died, hung or raised

Messages name the field and the limit and never repeat the caller's input. All of them survive pickling, because Ray
carries them from a replica to the caller of its handle.
"""


class LlamaError(Exception):
    """Base of the tree. `param` names the field at fault, `code` is what OpenAI's error body calls it."""

    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @property
    def message(self) -> str:
        return str(self.args[0])


class InvalidRequest(LlamaError, ValueError):
    code = "invalid_request"


class InvalidParameter(InvalidRequest):
    code = "invalid_parameter"


class InvalidDialog(InvalidRequest):
    """`index` is the message's place in the dialog, from 0; None when the dialog as a whole is at fault."""

    code = "invalid_dialog"

    def __init__(self, message: str, *, index: int | None = None, param: str | None = "messages") -> None:
        super().__init__(message, param=param)
        self.index = index


class SpecialTags(InvalidDialog):
    code = "special_tags"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ConfigError(LlamaError, ValueError):
    code = "invalid_config"


class CheckpointError(LlamaError):
    code = "invalid_checkpoint"


class TokenizerError(LlamaError):
    code = "invalid_tokenizer"


class EngineError(LlamaError):
    code = "engine_error"


class QueueFull(EngineError):
    """`retry_after_s` is when the caller should try again, in seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class NotReady(EngineError):
    """`retry_after_s` is when the caller should try again, in seconds."""

    code = "not_ready"

    def __init__(self, message: str, *, retry_after_s: float = 2.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RequestCancelled(EngineError):
    code = "request_cancelled"


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"


class NonFiniteLogits(EngineError):
    code = "non_finite_logits"


class PoisonRequest(EngineError):
    code = "poison_request"


class CheckpointChanged(EngineError):
    """Ranks that would take over found a checkpoint other than the one that live requests were generated with."""

    code = "checkpoint_changed"


class RankFailure(EngineError):
    """`rank` is the first rank seen to fail; None when the group as a whole did not come up.

    `raised`: it said so itself, with an exception that the step's own content may have caused. A process that died or hangs
    may have been ended or held up by anybody.
    """

    code = "rank_failure"

    def __init__(
        self, message: str, *, rank: int | None = None, raised: bool = False, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.rank = rank
        self.raised = raised

    def again(self) -> "RankFailure":
        """The same, to be raised once more: an exception that is raised twice collects both tracebacks."""
        return RankFailure(self.message, rank=self.rank, raised=self.raised, param=self.param)
