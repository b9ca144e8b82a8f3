"""A progress bar for loading weights, in a form that Ray forwards from a rank's stderr to the driver."""

import logging
import sys
from typing import Final, NoReturn, Protocol

from tqdm import tqdm

_INTERVAL_S: Final = 1.0


class _Text(Protocol):
    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class LoadProgressBar:
    """Draws "rank N weights" on stderr, or on `stream`; `update` takes bytes loaded and bytes in all."""

    def __init__(self, rank: int, stream: "_Text | None" = None) -> None:
        self._rank = rank
        self._stream = stream
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
                file=_LinePerRefresh(self._stream or sys.stderr),
            )
        self._bar.update(loaded - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class InfoLines:
    """Logs what is written, a line at a time."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def write(self, text: str, /) -> None:
        self._log.info("%s", text.rstrip())

    def flush(self) -> None:
        pass


class _LinePerRefresh:
    """Turns each refresh of the bar into a line of its own: Ray forwards whole lines only, no carriage returns."""

    def __init__(self, stream: _Text) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()
