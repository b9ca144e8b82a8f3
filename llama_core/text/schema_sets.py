"""Lists of distinct values as rules of Lark: some of the values, in their order."""

from collections.abc import Callable, Sequence
from typing import Final

_MAX_RULES: Final = 1024


def ordered_subset(
    items: Sequence[str], fewest: int, most: int | None, comma: str, rule: Callable[[str], str]
) -> str | None:
    """The body of a rule behind the opening bracket: `fewest` to `most` of the items, each at most once. None where no list has
    so many, or where the rules are too many.

    rule: makes a rule of a body, and returns its name.
    """
    most = None if most is None or most >= len(items) else most
    # Items that come before are counted up to `counted`, behind which their number does not matter.
    counted = max(fewest, 1) if most is None else most
    if len(items) * (counted + 1) > _MAX_RULES or not fewest <= (len(items) if most is None else most):
        return None
    # What may follow the items from the last one back, by the number of those before; "" where it leads to no end.
    behind = ["" if count < fewest else '"]"' for count in range(counted + 1)]
    for item in reversed(items):
        follows = list(behind)
        for count, rest in enumerate(follows):
            after = "" if count == most else follows[min(count + 1, counted)]
            if after:
                taken = f"{comma} {item} {after}" if count else f"{item} {after}"
                behind[count] = rule(f"{taken} | {rest}" if rest else taken)
    return behind[0]
