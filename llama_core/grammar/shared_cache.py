"""A cache that several owners share without learning of one another."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")

_BASE_BYTES: Final = 1024  # of an entry beside its texts


class SharedCache(Generic[Value]):
    """Values by owner and key: an owner finds its own values alone. Any thread may use it.

    Beyond the bound, the owner whose values take most together loses its least recently used one.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all values together; a single one may have more."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: dict[str, int] = {}  # bytes by owner
        self._values: dict[str, OrderedDict[Hashable, tuple[Value, int]]] = {}
        self._lock = Lock()

    def find(self, owner: str, key: Hashable) -> Value | None:
        with self._lock:
            own = self._values.get(owner)
            if own is None or (found := own.get(key)) is None:
                return None
            own.move_to_end(key)
            return found[0]

    def keep(self, owner: str, key: Hashable, value: Value, num_bytes: int) -> None:
        with self._lock:
            self._remove(owner, key)
            self._values.setdefault(owner, OrderedDict())[key] = value, num_bytes
            self._held[owner] = self._held.get(owner, 0) + num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                heaviest = max(self._held, key=self._held.__getitem__)
                if len(self._values) == len(self._values[heaviest]) == 1:
                    break
                self._remove(heaviest, next(iter(self._values[heaviest])))

    def find_or_make(self, owner: str, key: Hashable, make: Callable[[], Value]) -> Value:
        """For values that are texts, as keys are. What `make` raises is not kept."""
        if (found := self.find(owner, key)) is None:
            found = make()
            self.keep(owner, key, found, _BASE_BYTES + len(repr(key)) + len(repr(found)))
        return found

    def drop(self, owner: str, key: Hashable) -> None:
        with self._lock:
            self._remove(owner, key)

    def _remove(self, owner: str, key: Hashable) -> None:
        own = self._values.get(owner)
        if own is None or key not in own:
            return
        _, num_bytes = own.pop(key)
        self._num_bytes -= num_bytes
        self._held[owner] -= num_bytes
        if not own:
            del self._values[owner], self._held[owner]
