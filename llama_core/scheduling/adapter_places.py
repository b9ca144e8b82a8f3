"""Which LoRA adapter each of the ranks' places holds. Knows nothing of files or tensors."""

from collections.abc import Iterable, KeysView

from llama_core.scheduling.request import Sequence
from llama_core.scheduling.step import AdapterLoad


class AdapterPlaces:
    """Places 1 .. num_places; rows without an adapter have place 0. An adapter keeps its place until another one needs it,
    that which was used longest ago first; a running sequence keeps its adapter's.

    folders: where ranks find the files, by the adapter's digest.
    """

    def __init__(self, num_places: int) -> None:
        self.folders: dict[str, str] = {}
        self.num_places = num_places
        self._held: dict[str, int] = {}  # in the order of their last use

    @property
    def held(self) -> KeysView[str]:
        """The adapters that have a place."""
        return self._held.keys()

    def forget(self) -> None:
        """The ranks are new, and their places are empty."""
        self._held.clear()

    def drop(self, adapter: str, running: Iterable[Sequence]) -> None:
        """The ranks may not have been able to read it: they try again for its next sequence, unless another one runs."""
        if all(other.terms.adapter != adapter for other in running):
            self._held.pop(adapter, None)

    def has_place(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether the sequence may run beside these."""
        if not seq.terms.adapter or seq.terms.adapter in self._held or len(self._held) < self.num_places:
            return True
        return not self._held.keys() <= {other.terms.adapter for other in running}

    def take(self, seq: Sequence, running: Iterable[Sequence]) -> tuple[int, AdapterLoad | None]:
        """The place of an admitted sequence, and what the ranks have to load there. `has_place` is true."""
        if not seq.terms.adapter:
            return 0, None
        place, load = self._held.pop(seq.terms.adapter, 0), None
        if not place:
            free = set(range(1, self.num_places + 1)) - set(self._held.values())
            if free:
                place = min(free)
            else:
                used = {other.terms.adapter for other in running}
                place = self._held.pop(next(adapter for adapter in self._held if adapter not in used))
            load = AdapterLoad(place, seq.terms.adapter, self.folders[seq.terms.adapter])
        self._held[seq.terms.adapter] = place
        return place, load
