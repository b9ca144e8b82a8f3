"""How `llama-ray up` notices that Ray has ended; `tests/servers/` ends real servers."""

import socket

from deployments.local.shutdown import _is_refused


def test_an_address_is_refused_only_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert not _is_refused(f"127.0.0.1:{port}") and not _is_refused(f"localhost:{port}")
    assert _is_refused(f"127.0.0.1:{port}") and _is_refused(f"localhost:{port}")


def test_an_address_that_cannot_be_resolved_is_not_refused() -> None:
    assert not _is_refused("no-such-host.invalid:6379")
