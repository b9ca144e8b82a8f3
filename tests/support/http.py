"""httpx's functions without certificates, which take 15 ms of each call to load: tests speak plain HTTP to this machine."""

import ssl
from functools import partial
from typing import Final

import httpx

_NO_CERTIFICATES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_CERTIFICATES)
post = partial(httpx.post, verify=_NO_CERTIFICATES)
head = partial(httpx.head, verify=_NO_CERTIFICATES)
request = partial(httpx.request, verify=_NO_CERTIFICATES)
stream = partial(httpx.stream, verify=_NO_CERTIFICATES)
