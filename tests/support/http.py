"""What tests ask of servers on this machine over plain HTTP, without certificates, which take 15 ms of each call to load."""

import ssl
from functools import partial
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

_NO_CERTIFICATES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_CERTIFICATES)
post = partial(httpx.post, verify=_NO_CERTIFICATES)
head = partial(httpx.head, verify=_NO_CERTIFICATES)
request = partial(httpx.request, verify=_NO_CERTIFICATES)
stream = partial(httpx.stream, verify=_NO_CERTIFICATES)


def samples(text: bytes | str) -> dict[str, float]:
    """Each sample by its name and its labels but the model's: `name` or `name{cause="memory"}`."""
    found = {}
    for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels) if key != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
