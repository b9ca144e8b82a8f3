"""Processor time of work, for comparisons within one test: a slow or busy machine changes both sides of them."""

import time
from collections.abc import Callable


def processor_s(work: Callable[[], object], times: int = 3) -> float:
    """The least processor time in seconds, of all threads of this process, that `work` took in as many runs as `times`."""

    def once() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return min(once() for _ in range(times))
