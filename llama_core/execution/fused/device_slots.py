"""A slot table on the device. Its changes are collected on the host and travel with the inputs of the next step."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from llama_core.config import EngineConfig
from llama_core.execution.fused import rule_table
from llama_core.execution.fused.step_plan import Ints
from llama_core.execution.sampling_tensors import words_of
from llama_core.execution.slots import SlotTable
from llama_core.scheduling.step import Draft, Grow, SlotInit

_TOKENS: Final = 0
_BLOCKS: Final = 1
_SAMPLING: Final = 2
_RULES: Final = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Writes to one of the table's tensors: places (indices into the flattened tensor) and values, each int64 [N]. No place
    occurs twice."""

    target: int
    places: Ints
    values: Ints


class DeviceSlots(SlotTable):
    """A backend sends what `take_changes` returns with its step, and calls `apply` before any kernel reads the table.

    rule_words: int64 [slots, `rule_table.table_words`], of the slots whose `rules` are not None; else without rules.
    """

    def __init__(self, config: EngineConfig, device: torch.device, spare: int) -> None:
        super().__init__(config, device, spare)
        words = rule_table.table_words(config.vocab_size)
        self.rule_words = torch.zeros((len(self.rules), words), dtype=torch.int64, device=device)
        tables = (self.tokens, self.block_tables, self.sampling.words, self.rule_words)
        self._targets = [table.view(-1) for table in tables]
        self._strides = [table.shape[1] for table in tables]
        self._writes: list[list[tuple[int, Seq[int] | Ints]]] = [[] for _ in tables]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(target.nbytes for target in self._targets)

    def admit(self, init: SlotInit) -> None:
        self._write(_TOKENS, init.slot, 0, init.tokens)
        self._write(_BLOCKS, init.slot, 0, init.blocks)
        self._write(_SAMPLING, init.slot, 0, words_of(init.params))
        had_rules = self.rules[init.slot] is not None
        self._note(init)
        rules = self.rules[init.slot]
        if rules is not None:
            for first, values in rule_table.parts_of(rules):
                self._write(_RULES, init.slot, first, values)
        elif had_rules:
            self._write(_RULES, init.slot, 0, rule_table.NO_RULES)

    def grow(self, grow: Grow) -> None:
        slot, block = grow
        self._write(_BLOCKS, slot, self.num_blocks[slot], [block])
        self.num_blocks[slot] += 1

    def propose(self, draft: Draft) -> None:
        slot, start, tokens = draft
        self._write(_TOKENS, slot, start, tokens)

    def take_changes(self) -> list[Change]:
        """The changes since the last call."""
        changes = []
        for target, writes in enumerate(self._writes):
            if writes:
                places = [np.arange(first, first + len(values)) for first, values in writes]
                values = [np.asarray(values, dtype=np.int64) for _, values in writes]
                changes.append(Change(target, np.concatenate(places), np.concatenate(values)))
                writes.clear()
        return changes

    def apply(self, changes: Seq[Change], sent: Seq[torch.Tensor]) -> None:
        """Write `changes`, whose places and values lie on the device: `sent` has both of each."""
        for change, places, values in zip(changes, sent[::2], sent[1::2], strict=True):
            self._targets[change.target].index_copy_(0, places, values)

    def _write(self, target: int, slot: int, first: int, values: Seq[int] | Ints) -> None:
        self._writes[target].append((slot * self._strides[target] + first, values))
