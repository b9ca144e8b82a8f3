"""How a front reaches an engine. A Ray call carries it, so only programs of the Ray cluster can have it."""

from dataclasses import dataclass, field, fields

from cluster.wire.tls import GroupKey


@dataclass(frozen=True, slots=True)
class Invitation:
    """engine: its id, of one life of its process. node: Ray's id of its node, where `path` is a unix socket. Other nodes
    connect to host and port, with TLS; both sides present the certificate of `key`. application: Serve's, and weights: the
    digest of its model's."""

    engine: str
    model: str
    node: str
    path: str
    host: str
    port: int
    secret: bytes = field(repr=False)
    key: GroupKey = field(repr=False)
    application: str = ""
    weights: str = ""

    def __setstate__(self, state: list[object]) -> None:
        """state: the values of all fields, in order; those of another release may be fewer or more."""
        for at, each in enumerate(fields(self)):
            object.__setattr__(self, each.name, state[at] if at < len(state) else each.default)
