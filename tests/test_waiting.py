"""No test needs a fast or quiet machine."""

import ast
import re
from pathlib import Path

# Test files that may read a clock, and what for.
CLOCKS = {
    "cluster/driver/test_group_start.py": "brings a deadline forward",
    "deployments/http/test_bounded_fields.py": "processor time, of which it needs a tenth",
    "deployments/observe/test_request_spans.py": "compares the order of times, not their differences",
    "llama_core/grammar/test_closed_objects.py": "processor time, of which it needs a tenth",
    "llama_core/scheduling/test_fair_queue.py": "processor time, of which it needs a third",
}
CLOCK = re.compile(r"(time|monotonic|perf_counter|process_time|thread_time)(_ns)?")


def test_no_test_compares_a_time_with_a_number() -> None:
    """A slow or busy machine would fail it. `tests/support/waiting.py` has times to compare with each other."""
    tests = Path(__file__).parent
    reading = set()
    for file in tests.rglob("test_*.py"):
        if re.search(r"^LOOPS = ", text := file.read_text(), re.MULTILINE):  # its clock is virtual
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        names = [call.func.attr for call in calls if isinstance(call.func, ast.Attribute) and not call.args]
        if any(map(CLOCK.fullmatch, names)):
            reading.add(str(file.relative_to(tests)))
    assert reading == CLOCKS.keys()
