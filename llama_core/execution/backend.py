"""The seam between what a step is (`runner.py`) and how it is computed: torch anywhere, C++ on CPU cores, graphs on GPUs."""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch

from llama_core.scheduling.step import Pending, Row


class Drawn(NamedTuple):
    """What a step's rows drew, in their order, and which draws had logits that are not finite: their tokens mean nothing."""

    tokens: list[int]
    non_finite: list[int]


class Backend(Protocol):
    """One rank's weights, cache and buffers. The slots are the runner's: a backend reads them, and writes drawn tokens.

    name: how it computes, for people. weight_bytes: of this rank, as they lie in memory. working_bytes: all that a step
    needs beside weights and cache. cache_block_bytes: keys and values of one block in all layers. seconds_waited: for the
    other ranks, in all steps so far; None if that is not known.
    """

    @property
    def name(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def working_bytes(self) -> int: ...
    @property
    def cache_block_bytes(self) -> int: ...
    @property
    def seconds_waited(self) -> float | None: ...

    def allocate_cache(self, num_blocks: int) -> None: ...

    def start(self, rows: Seq[Row], *, keep_logits: bool) -> Pending[Drawn]:
        """Run the rows, draw, remember what was drawn. The same on every rank. `keep_logits`: `logits_of_draws` may follow.

        The next step may start before this one's result is read, unless its logits are asked for.
        """

    def logits_of_draws(self, draws: Seq[int]) -> torch.Tensor:
        """float32 [len(draws), vocab] behind these draws of the latest step, on every rank."""

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        """float32 [len(tokens), vocab] after these tokens of the latest step, counted from its first, on every rank.

        The logits of the draws are gone then.
        """
