"""Pools the hidden states of prompts into embeddings, whatever the backend.

A mean is summed in float32 and in the order of the tokens, so that its bits depend neither on chunks nor on other rows.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llama_core.scheduling.step import Embedding, Row, SlotInit

_STATES_AT_A_TIME: Final = 64


class PooledRow(NamedTuple):
    """tokens: of the step, counted from its first, whose states are added. begins, ends: they are the first, or the last, of
    the `num_pooled` tokens that the slot pools."""

    row: int
    slot: int
    tokens: range
    begins: bool
    ends: bool
    num_pooled: int


class Pooling:
    """What slots pool: positions of their prompts, until all are computed, and the sums of the states so far."""

    def __init__(self) -> None:
        self._positions: dict[int, range] = {}
        self._sums: dict[int, npt.NDArray[np.float32]] = {}

    def admit(self, init: SlotInit) -> None:
        self._positions.pop(init.slot, None)
        if init.params.pooling:
            length = len(init.tokens)
            ends = {"mean": (0, length), "first": (0, 1), "last": (length - 1, length)}[init.params.pooling]
            self._positions[init.slot] = range(*ends)

    def rows(self, rows: Seq[Row]) -> list[PooledRow]:
        """The rows of a step with states to pool; the same on all ranks. Call it once a step."""
        return list(self._rows(rows)) if self._positions else []

    def _rows(self, rows: Seq[Row]) -> Iterator[PooledRow]:
        end = 0
        for i, row in enumerate(rows):
            begin, end = end, end + row.length
            if (wanted := self._positions.get(row.slot)) is None:
                continue
            first, last = max(row.start, wanted.start), min(row.start + row.length, wanted.stop)
            if first < last:
                if last == wanted.stop:
                    del self._positions[row.slot]
                tokens = range(begin + first - row.start, begin + last - row.start)
                yield PooledRow(i, row.slot, tokens, first == wanted.start, last == wanted.stop, len(wanted))

    def pool(self, pooled: Seq[PooledRow], states_of: Callable[[range], torch.Tensor]) -> list[Embedding]:
        """Add the states of a step. states_of: `Backend.hidden_states_of_tokens`. Returns the embeddings of the rows that end
        what their slots pool."""
        done = []
        for row in pooled:
            total = None if row.begins else self._sums.pop(row.slot)
            for at in range(0, len(row.tokens), _STATES_AT_A_TIME):
                for state in states_of(row.tokens[at : at + _STATES_AT_A_TIME]).cpu().numpy():
                    total = state.copy() if total is None else np.add(total, state, out=total)
            assert total is not None, "a row has tokens"
            if row.ends:
                vector = total / np.float32(row.num_pooled)
                done.append(Embedding(row.row, vector.tobytes() if np.isfinite(vector).all() else b""))
            else:
                self._sums[row.slot] = total
        return done
