"""Finds the network interface that has an address. The standard library lists interface names only."""

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_SIOCGIFADDR: Final = 0x8915  # <linux/sockios.h>
_IF_INET6: Final = Path("/proc/net/if_inet6")  # one line an address: 32 hexadecimal digits, four numbers, the interface


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 or IPv6 address; None if there is none or the system does not tell."""
    if sys.platform != "linux":
        return "lo0" if is_loopback(address) else None
    wanted = ipaddress.ip_address(address)
    return _interface_of_ipv6(wanted) if isinstance(wanted, ipaddress.IPv6Address) else _interface_of_ipv4(address)


def _interface_of_ipv4(address: str) -> str | None:
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


def _interface_of_ipv6(address: ipaddress.IPv6Address) -> str | None:
    with suppress(OSError):  # the kernel has no IPv6
        for line in _IF_INET6.read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(address):
                return name
    return None
