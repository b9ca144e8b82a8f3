"""Ends the server of `llama-ray up`: a first signal lets live requests end; a second, or the end of Ray, ends all at once."""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from cluster.wire.process_end import ProcessIdentity, is_running
from deployments.local import haproxy, process_tag
from deployments.local.console import Console
from deployments.local.deployment_watcher import DeploymentWatcher

SLOW_READERS_S: Final = 60.0  # the time for generated text to reach clients before the server ends
SERVE_ENDS_S: Final = 10.0  # after the drain, for Serve to end the replicas of this command's own cluster
_LOOK_EVERY_S: Final = 0.2
_LOOK_WHILE_SERVING_S: Final = 1.0
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Shutdown:
    """The signals of `llama-ray up`, and the end of its process. While it drains, new requests are answered 503."""

    def __init__(
        self,
        watcher: DeploymentWatcher,
        console: Console,
        tag: str,
        haproxy_directory: Path,
        clean_up: Callable[[], None],
    ) -> None:
        """tag: of all processes that this command started. clean_up: removes the command's temporary files."""
        self.is_requested = False
        self._watcher, self._console = watcher, console
        self._tag, self._haproxy_directory, self._clean_up = tag, haproxy_directory, clean_up
        self._has_ray = False
        self._raylet: ProcessIdentity | None = None
        self._gcs_address: str | None = None
        self._ending = threading.Lock()
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)

    def start(self) -> None:
        """Take the signals from now on. A thread acts on them: calls to Ray in the main thread would delay a handler."""
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._set_handlers()
        threading.Thread(target=self._obey, daemon=True, name="shutdown").start()

    def ray_started(self) -> None:
        """This process is connected to Ray. From now on the server ends when Ray's own processes of this command have ended."""
        import ray

        self._set_handlers()  # connecting has replaced the handler of SIGTERM
        if self._watcher.owns_cluster:
            self._gcs_address = str(ray.get_runtime_context().gcs_address)
            if (pid := process_tag.raylet_of(self._tag)) is not None:
                self._raylet = ProcessIdentity.of(pid)
        self._has_ray = True

    def end(self) -> NoReturn:
        """End every process that this command started, then this one. One caller does so; another waits."""
        with self._ending:
            status = 1
            try:
                self._watcher.stopping.set()
                process_tag.end_tagged_processes(self._tag)
                self._clean_up()
                status = self._exit_status()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)  # Ray's own exit handlers would wait for processes that have ended

    def _exit_status(self) -> int:
        """0 for a requested shutdown, else 1: `serve run` ends with status 0 even after an error."""
        if self.is_requested and self._watcher.failure is None:
            self._console.event("Stopped")
            return 0
        if self._watcher.failure is None:
            self._console.event(f"\nServe ended by itself. The last lines of its output:\n{self._console.end_of_log()}")
        return 1

    def _set_handlers(self) -> None:
        """Python writes a signal's number to `_wakeup` before it calls the handler, which has nothing to do."""
        for number in _SIGNALS:  # a shell has SIGINT ignored by the commands that it starts in the background
            signal.signal(number, lambda *_: None)

    def _obey(self) -> None:
        try:
            self._wait_for_the_end()
            self._watcher.stopping.set()
            if self._has_ray:
                self._end_gracefully()
        finally:
            self.end()

    def _wait_for_the_end(self) -> None:
        """Until a signal, which a failure of the deployment sends too, or the end of Ray."""
        while not self._is_signalled(_LOOK_WHILE_SERVING_S):
            if self._has_ray_ended() and not self._is_signalled(_LOOK_EVERY_S):
                self._watcher.failure = "Ray has ended: its raylet or its control service does not run any more"
                self._console.event(f"\n{self._watcher.failure}.")
                return
        self.is_requested = self._watcher.failure is None

    def _end_gracefully(self) -> None:
        """Drain, then have Serve end. A second signal, or a failure, skips the drain, and on a cluster of this command's own
        also the end of Serve.
        """
        is_drained = self.is_requested and self._completes(self._drain, math.inf)
        if self.is_requested and self._has_ray_ended():
            self._console.event("Ray has ended too: live requests cannot be drained.")
        elif is_drained or not self._watcher.owns_cluster:
            self._console.event("Stopping")
            self._completes(self._end_serve, SERVE_ENDS_S if self._watcher.owns_cluster else math.inf)

    def _completes(self, step: Callable[[], None], limit_s: float) -> bool:
        """Whether the step ends before its limit, another signal, and the end of Ray, after which it would wait for ever."""
        thread = threading.Thread(target=step, daemon=True, name=step.__name__)
        thread.start()
        deadline = time.monotonic() + limit_s
        while thread.is_alive():
            if self._is_signalled(_LOOK_EVERY_S) or time.monotonic() > deadline or self._has_ray_ended():
                return False
        return True

    def _is_signalled(self, within_s: float) -> bool:
        self._signals.settimeout(within_s)
        try:
            return bool(self._signals.recv(1))
        except TimeoutError:
            return False

    def _has_ray_ended(self) -> bool:
        """Whether the raylet or the GCS server of this command's own cluster has ended.

        After SIGTERM to all processes, as systemd by default ends a service, the GCS server stops listening at once, but its
        process and the raylet take ten seconds more, in which Ray's threads of this process call it without a pause.
        """
        return (self._raylet is not None and not is_running(self._raylet)) or (
            self._gcs_address is not None and _is_refused(self._gcs_address)
        )

    def _drain(self) -> None:
        from ray import serve

        app = self._watcher.app_name
        with contextlib.suppress(Exception):  # the server must end even if this fails
            if serve.status().applications[app].status == "RUNNING":
                self._console.event("Draining: live requests may end. A second Ctrl-C ends them at once.")
                serve.get_app_handle(app).broadcast("drain").results()
                self._wait_for_slow_readers()

    def _wait_for_slow_readers(self) -> None:
        """Wait until HAProxy has no open request: Serve ends HAProxy before the replicas.

        A client that reads nothing is cut off by the replica or by HAProxy; this wait is for clients that read slowly.
        """
        deadline = time.monotonic() + SLOW_READERS_S
        with contextlib.suppress(OSError, ValueError):  # there is no HAProxy, or it is another server's
            while haproxy.num_open(self._haproxy_directory) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _end_serve(self) -> None:
        """Have Serve end all applications, whose replicas then export their last traces, and disconnect from Ray."""
        import ray
        from ray import serve

        ending = threading.Thread(target=serve.shutdown, daemon=True, name="serve-shutdown")
        ending.start()
        while ending.is_alive():
            # Serve would wait for ever for the drain of a replica that is still pending.
            with contextlib.suppress(Exception):
                _end_pending_replicas(self._watcher.app_name)
            ending.join(_LOOK_EVERY_S)
        if self._watcher.is_alive():
            self._watcher.join(2)
        ray.shutdown()


def _is_refused(address: str) -> bool:
    """Whether nothing listens at HOST:PORT of this machine."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _end_pending_replicas(app_name: str) -> None:
    """End this application's replicas that wait for room. Serve then removes their placement groups."""
    import ray
    from ray.util import placement_group_table

    for group in placement_group_table().values():
        if group["state"] == "PENDING" and group["name"].startswith(f"SERVE_REPLICA::{app_name}#"):
            ray.kill(ray.get_actor(group["name"], namespace="serve"))
