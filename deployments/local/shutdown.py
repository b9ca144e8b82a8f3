"""Ends a server on a signal: the first signal lets live requests end, the second ends everything at once."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from deployments.local import controller_interval, haproxy, ray_patches
from deployments.local.console import Console
from deployments.local.deployment_watcher import DeploymentWatcher
from deployments.local.process_tag import end_tagged_processes, has_raylet

SLOW_READERS_S: Final = 60.0  # the time for generated text to reach clients before the server ends
_LOOK_EVERY_S: Final = 0.2


class Shutdown:
    """The signal handler of `llama-ray up`. While it drains, new requests are answered 503."""

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
        self._is_over = threading.Event()
        self._watcher, self._console = watcher, console
        self._tag, self._haproxy_directory, self._clean_up = tag, haproxy_directory, clean_up
        self._threads = [threading.Thread(target=self._drain_and_end, daemon=True, name="shutdown")]
        if watcher.owns_cluster:
            self._threads.append(threading.Thread(target=self._end_without_ray, daemon=True, name="raylet-watcher"))

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.is_requested or self._watcher.failure is not None:
            raise KeyboardInterrupt
        self.is_requested = True
        self._watcher.stopping.set()
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Stop the threads, which would wait for ever after the caller has disconnected from Ray."""
        self._is_over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5)

    def _end_without_ray(self) -> None:
        """End at once when Ray has been ended too, as by systemd, which by default signals all processes of a unit.

        No replica can drain then, and every call to Ray would wait for ever. The GCS server stops listening at once, but its
        process and the raylet take ten seconds more, in which Ray's threads of this process call it without a pause.
        """
        gcs_address = _gcs_address()
        while not self._is_over.wait(_LOOK_EVERY_S):
            has_ended = not has_raylet(self._tag) or (gcs_address is not None and _is_refused(gcs_address))
            if has_ended and not self._is_over.is_set():
                self._console.event("Ray has ended too: live requests cannot be drained.")
                end_tagged_processes(self._tag, terminate_for_s=1.0)
                self._clean_up()
                os._exit(0)

    def _drain_and_end(self) -> None:
        from ray import serve

        app = self._watcher.app_name
        if self._watcher.owns_cluster:
            controller_interval.set_interval(controller_interval.STARTING_S)
        with contextlib.suppress(Exception):  # the server must end even if this fails
            if serve.status().applications[app].status == "RUNNING":
                self._console.event("Draining: live requests may end. A second Ctrl-C ends them at once.")
                serve.get_app_handle(app).broadcast("drain").results()
                self._wait_for_slow_readers()
        self._console.event("Stopping")
        hide_controller_errors()
        os.kill(os.getpid(), signal.SIGINT)
        # Serve would wait for ever for the drain of a replica that is still pending.
        while not self._is_over.wait(_LOOK_EVERY_S):
            with contextlib.suppress(Exception):
                _end_pending_replicas(app)

    def _wait_for_slow_readers(self) -> None:
        """Wait until HAProxy has no open request: Serve ends HAProxy before the replicas.

        A client that reads nothing is cut off by the replica or by HAProxy; this wait is for clients that read slowly.
        """
        deadline = time.monotonic() + SLOW_READERS_S
        with contextlib.suppress(OSError, ValueError):  # there is no HAProxy, or it is another server's
            while haproxy.num_open(self._haproxy_directory) and time.monotonic() < deadline:
                if self._is_over.wait(0.05):
                    return


def _gcs_address() -> str | None:
    """HOST:PORT of the GCS server; None after this process has disconnected from Ray."""
    import ray

    try:
        return str(ray.get_runtime_context().gcs_address)
    except Exception:  # Ray raises a plain one
        return None


def _is_refused(address: str) -> bool:
    """Whether nothing listens at HOST:PORT of this machine."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def hide_controller_errors() -> None:
    """Drop Ray's errors about Serve's controller from now on: Serve kills it while calls to it are open."""
    if not ray_patches.is_supported():
        return
    from ray._private import worker

    module: Any = worker
    show = module.print_to_stdstream

    def show_others(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        data = {**data, "lines": [line for line in data["lines"] if "Task ServeController." not in line]}
        if data["lines"]:
            show(data, *arguments, **options)

    module.print_to_stdstream = show_others


def _end_pending_replicas(app_name: str) -> None:
    """End this application's replicas that wait for room. Serve then removes their placement groups."""
    import ray
    from ray.util import placement_group_table

    for group in placement_group_table().values():
        if group["state"] == "PENDING" and group["name"].startswith(f"SERVE_REPLICA::{app_name}#"):
            ray.kill(ray.get_actor(group["name"], namespace="serve"))
