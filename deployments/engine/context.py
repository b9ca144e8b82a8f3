"""The reason for the context of a replica, for its banner, its log and GET /props."""

from llama_core.config import UNKNOWN_CONTEXT


def context_reason(max_seq_len: int, configured: int | None, of_model: int | None, limit: str | None = None) -> str:
    """The phrase that follows "max_seq_len 8,192, ". configured: the argument, of_model: the model's context; both in tokens,
    None if not given. limit: the cause of a shorter context; None: memory."""
    if configured is not None:
        beyond = of_model is not None and max_seq_len > of_model
        return f"as configured, beyond the model's context of {of_model:,}" if beyond else "as configured"
    wanted = of_model or UNKNOWN_CONTEXT
    if max_seq_len < wanted:
        return f"{limit}, of the model's {wanted:,}" if limit else f"what memory holds of the model's {wanted:,}"
    return "the model's context" if of_model is not None else "the default where a checkpoint does not say its context"
