"""One key pair for each start of a rank group: both ends present the same certificate and accept no other, so a connection is
as private as the Ray call that carried the key. The key is never stored, and is on disk only during one library call.

`TlsListener` counts connections before they have shaken hands: each of them keeps 20 KB until it does.
"""

import asyncio
import datetime
import socket
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

_LIFETIME: Final = datetime.timedelta(days=3650)  # a group may serve for years; its key is gone with it
_CLOCK_SKEW: Final = datetime.timedelta(days=1)  # nodes' clocks may differ


@dataclass(frozen=True, slots=True)
class GroupKey:
    """A self-signed certificate and its private key, both PEM."""

    certificate: str
    private_key: str = field(repr=False)


def make_group_key() -> GroupKey:
    """A new elliptic-curve key (P-256); takes a few milliseconds."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llama rank group")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return GroupKey(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def tls_context(key: GroupKey, side: Literal["driver", "rank"]) -> ssl.SSLContext:
    """TLS 1.3 that presents `key`'s certificate and trusts no other. Host names are not checked: the key is the identity."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "driver" else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key.certificate)
    with tempfile.TemporaryDirectory() as directory:  # mode 0700; ssl loads a private key only from a file
        path = Path(directory) / "group.pem"
        path.touch(mode=0o600)
        path.write_text(key.private_key + key.certificate)
        context.load_cert_chain(path)
    return context


HANDSHAKE_S: Final = 30.0  # between busy processes
MAX_WAITING: Final = 256  # connections that shake hands; one more ends the oldest


class TlsListener:
    """Listens at a port that the kernel picks."""

    def __init__(self, make: Callable[[], asyncio.Protocol], host: str, context: ssl.SSLContext) -> None:
        """make: the protocol of a connection that has shaken hands. Raises OSError."""
        self._make, self._context = make, context
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=MAX_WAITING)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._accepting = asyncio.create_task(self._accept())
        self._accepting.add_done_callback(lambda _: self._socket.close())

    def close(self) -> None:
        for task in (self._accepting, *self._waiting):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:  # too many open files
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(self._shake_hands(connection))
            self._waiting[task] = None
            task.add_done_callback(lambda done: self._waiting.pop(done, None))
            if len(self._waiting) > MAX_WAITING:
                oldest = next(iter(self._waiting))
                oldest.cancel()
                self._waiting.pop(oldest)

    async def _shake_hands(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # TimeoutError and ssl.SSLError are among them
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
