"""What clients and probes are told about whether the engine takes requests."""

from deployments.engine.interface import Engine, Readiness
from llama_core.errors import NotReady


def check_takes_requests(engine: Engine) -> None:
    """Raises NotReady, which says why and when to come back."""
    readiness = engine.readiness()
    if not readiness.takes_requests:
        raise not_ready(readiness)


def not_ready(readiness: Readiness) -> NotReady:
    detail = f"The server is not ready ({readiness.phase}). {readiness.detail}".strip()
    return NotReady(detail, retry_after_s=readiness.retry_after_s)
