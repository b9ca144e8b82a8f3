"""Lists as rules of Lark: of distinct values, in their order, and with a number of items of one kind."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

_MAX_RULES: Final = 1024


def has_rules(num_items: int, fewest: int, most: int | None) -> bool:
    """Whether `ordered_subset` finds rules."""
    most = None if most is None or most >= num_items else most
    return num_items * (_counted(fewest, most) + 1) <= _MAX_RULES and fewest <= (num_items if most is None else most)


def _counted(fewest: int, most: int | None) -> int:
    """Up to which number the items that come before are counted, behind which it does not matter."""
    return max(fewest, 1) if most is None else most


def ordered_subset(
    items: Sequence[str], fewest: int, most: int | None, comma: str, rule: Callable[[str], str]
) -> str | None:
    """The body of a rule behind the opening bracket: `fewest` to `most` of the items, each at most once. None where no list has
    so many, or where the rules are too many.

    rule: makes a rule of a body, and returns its name.
    """
    if not has_rules(len(items), fewest, most):
        return None
    most = None if most is None or most >= len(items) else most
    counted = _counted(fewest, most)
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


def counted_items(
    kind: str,
    kind_limits: tuple[int, int | None],
    other: str | None,
    limits: tuple[int, int | None],
    comma: str,
    rule: Callable[[str], str],
    *,
    is_behind: bool,
) -> str | None:
    """The rest of a list that begins with the fewest of `kind`, an item. None where no list has so many items, or where the
    rules are too many.

    The kind comes first because a model might go on with other items for ever. kind_limits, limits: fewest and most of the
    kind, and of all items; None: any number. other: what also follows, None where nothing does; it takes the items of `kind`
    too, unless their number has a most. is_behind: other items come before. rule: makes a rule of a body, and returns its name.
    """
    (fewest_of_kind, most_of_kind), (fewest, most) = kind_limits, limits
    # Items are counted up to `counted`, behind which their number does not matter.
    counted = max(fewest, fewest_of_kind) if most is None else most
    counted_of_kind = fewest_of_kind if most_of_kind is None else most_of_kind
    if (counted - fewest_of_kind + 1) * (counted_of_kind - fewest_of_kind + 1) > _MAX_RULES or counted < fewest_of_kind:
        return None

    def ways(count: int, count_of_kind: int, separator: str) -> list[str]:
        """What may follow."""
        needs_kind = count_of_kind < fewest_of_kind
        found = ['"]"'] if count >= fewest and not needs_kind else []
        if count == most:
            return found
        if count_of_kind < counted_of_kind and (rest := behind(min(count + 1, counted), count_of_kind + 1)):
            found.append(f"{separator} {kind} {rest}")
        repeats = separator and count == counted  # before what `behind` returns
        if (
            other is not None
            and not (repeats or needs_kind)
            and (rest := behind(min(count + 1, counted), count_of_kind))
        ):
            found.append(f"{separator} {other} {rest}")
        return found

    @cache
    def behind(count: int, count_of_kind: int) -> str:
        """The rule of what follows so many items and so many of the kind; "" where no list does."""
        if not (found := ways(count, count_of_kind, comma)):
            return ""
        repeats = other is not None and count == counted != most and count_of_kind >= fewest_of_kind
        repeated = f"({comma} {other})* " if repeats else ""
        return rule(f"{repeated}({' | '.join(found)})")

    found = [] if is_behind else ways(0, 0, "")
    return behind(0, 0) or None if is_behind else f"({' | '.join(found)})" if found else None
