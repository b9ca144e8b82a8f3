"""A progress bar for loading weights, in a form that Ray forwards from a rank's stderr to the driver."""

import sys
from collections.abc import Callable
from typing import Final, NoReturn

from tqdm import tqdm

_INTERVAL_S: Final = 1.0


class LoadProgressBar:
    """Draws "rank N weights" on stderr, or hands each line to `write_line`; `update` takes bytes loaded and bytes in all."""

    def __init__(self, rank: int, write_line: Callable[[str], object] | None = None) -> None:
        self._rank = rank
        self._write_line = write_line or (lambda line: print(line, file=sys.stderr, flush=True))
        self._bar: tqdm[NoReturn] | None = None

    def update(self, loaded: int, total: int) -> None:
        if self._bar is None:
            tqdm.monitor_interval = 0  # no thread that would outlive the bar
            self._bar = tqdm(
                desc=f"rank {self._rank} weights",
                total=total,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                mininterval=_INTERVAL_S,
                ncols=90,
                ascii=" =",
                file=self,
            )
        self._bar.update(loaded - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def write(self, text: str) -> None:
        """What the bar writes. Each refresh becomes a line of its own: Ray forwards whole lines only, no carriage returns."""
        if line := text.strip("\r\n "):
            self._write_line(line)

    def flush(self) -> None:
        pass
