"""torch's key-value store for ranks of several nodes."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

_POLL_S: Final = 0.01


class CallStore(dist.Store):  # type: ignore[name-defined,misc]
    """Keys that `call(method, *arguments)` reaches: `cluster.wire.rank_runner.Keys` of rank 0. `call` raises ConnectionError;
    methods raise DistStoreError, as for other errors between ranks."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._call(method, *arguments)
        except ConnectionError as error:
            raise dist.DistStoreError(str(error)) from None

    def clone(self) -> "CallStore":
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no rank has set {', '.join(keys)}")
            time.sleep(_POLL_S)
