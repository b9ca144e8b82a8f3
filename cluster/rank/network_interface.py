"""Which network interface has an address. The standard library lists names only."""

import ipaddress
import socket
import struct
import sys
from typing import Final

_SIOCGIFADDR: Final = 0x8915  # <linux/sockios.h>


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address; None if there is none or the system does not tell."""
    if sys.platform != "linux":
        return "lo0" if is_loopback(address) else None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
