"""Lists as rules of Lark: of distinct values, in their order, and with a number of items of one kind."""

from collections.abc import Callable, Sequence
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
    # Behind the first ones of the kind: further items, and those of the kind among them where their number has a most. They are
    # counted up to the last column and row, behind which their number does not matter.
    fewest_further = max(fewest - fewest_of_kind, 0)
    num_columns = 1 + (fewest_further if most is None else most - fewest_of_kind)
    num_rows = 1 if most_of_kind is None else 1 + most_of_kind - fewest_of_kind
    if num_columns < 1 or num_columns * num_rows > _MAX_RULES:
        return None

    def ways(count: int, row: int, separator: str) -> list[str]:
        """What may follow so many further items, `row` of them of the kind."""
        found = ['"]"'] if count >= fewest_further else []
        after = min(count + 1, num_columns - 1)
        if most is None or count < after:
            if row + 1 < num_rows and behind[after][row + 1]:
                found.append(f"{separator} {kind} {behind[after][row + 1]}")
            # Otherwise they are repeated in front of all ways.
            if other is not None and (count < after or not separator) and behind[after][row]:
                found.append(f"{separator} {other} {behind[after][row]}")
        return found

    # The rules of what follows, from the last one back; "" where no list does.
    behind = [[""] * num_rows for _ in range(num_columns)]
    for count in reversed(range(num_columns)):
        for row in reversed(range(num_rows)):
            if found := ways(count, row, comma):
                is_repeated = other is not None and most is None and count == num_columns - 1
                repeated = f"({comma} {other})* " if is_repeated else ""
                behind[count][row] = rule(f"{repeated}({' | '.join(found)})")
    if fewest_of_kind:
        first = f"{comma} {kind}" if is_behind else kind
        more = f" ({comma} {kind}){{{fewest_of_kind - 1}}}" if fewest_of_kind > 1 else ""
        return f"{first}{more} {behind[0][0]}" if behind[0][0] else None
    begins = ways(0, 0, "")
    return f"({' | '.join(begins)})" if begins else None
