"""The bounds of the HTTP layer, with their defaults."""

from dataclasses import dataclass, field

from deployments.http.request_body import BodyLimits
from deployments.http.resume.kept_streams import KeepLimits
from deployments.openai.prompt_encoder import TextLimits


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body: BodyLimits = field(default_factory=BodyLimits)
    text: TextLimits = field(default_factory=TextLimits)
    ping_s: float = 15.0  # the interval of ": ping" on an idle stream
    send_timeout_s: float = 30.0  # a client that reads nothing for so long is disconnected
    keep: KeepLimits = field(default_factory=KeepLimits)  # of streams that a client may resume
    request_timeout_s: float | None = None  # from a request's head to its answer's end; a client may ask for less
