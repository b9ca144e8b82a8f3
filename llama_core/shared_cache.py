"""A cache that several owners share without learning of one another, and which owner such a cache evicts from."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
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
        self._values: OrderedDict[tuple[str, Hashable], tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def find(self, owner: str, key: Hashable) -> Value | None:
        with self._lock:
            if (found := self._values.get((owner, key))) is None:
                return None
            self._values.move_to_end((owner, key))
            return found[0]

    def keep(self, owner: str, key: Hashable, value: Value, num_bytes: int) -> None:
        with self._lock:
            self._remove((owner, key))
            self._values[owner, key] = value, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._values) > 1:
                heaviest = heaviest_owner((owner, size) for (owner, _), (_, size) in self._values.items())
                self._remove(next(each for each in self._values if each[0] == heaviest))

    def find_or_make(self, owner: str, key: Hashable, make: Callable[[], Value]) -> Value:
        """For values that are texts, as keys are. What `make` raises is not kept."""
        if (found := self.find(owner, key)) is None:
            found = make()
            self.keep(owner, key, found, _BASE_BYTES + len(repr(key)) + len(repr(found)))
        return found

    def drop(self, owner: str, key: Hashable) -> None:
        with self._lock:
            self._remove((owner, key))

    def _remove(self, key: tuple[str, Hashable]) -> None:
        _, num_bytes = self._values.pop(key, (None, 0))
        self._num_bytes -= num_bytes


def heaviest_owner(sizes: Iterable[tuple[str, int]]) -> str:
    """The owner whose values take most together; of equal owners, the first. sizes: owner and size of each value."""
    held: dict[str, int] = {}
    for owner, size in sizes:
        held[owner] = held.get(owner, 0) + size
    return max(held, key=held.__getitem__)
