"""Connections of a process, seen and cut from outside."""

import contextlib
import ctypes
import os
import socket
from typing import Final

import psutil

_PIDFD_GETFD: Final = 438  # the system call's number, the same on every architecture


def cut_connections(pid: int, port: int) -> None:
    """Shut down, from outside, the connections of a process to a port."""
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            handle = os.pidfd_open(pid)
            descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, connection.fd, 0)
            os.close(handle)
            assert descriptor >= 0, os.strerror(ctypes.get_errno())
            with socket.socket(fileno=descriptor) as own, contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)


def ports_to(port: int, pid: int) -> list[int]:
    """The ports of a process's connections with `port` of this machine."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).net_connections("tcp")
        return [each.laddr.port for each in found if each.raddr and each.raddr.port == port]
    return []
