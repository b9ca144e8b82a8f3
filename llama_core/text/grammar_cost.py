"""Which grammars may take long to check and to compile, by their text alone: llguidance bounds the time of most of them."""

import re
from typing import Final

BRIEF_CHARS: Final = 20_000  # of a grammar: a schema of as many takes up to 50 ms
# llguidance bounds neither the time nor the memory for multiples: 5 s and 0.3 GB for one of 6 digits, more where a schema joins
# several. A JSON text within the grammar may escape the letters of a keyword.
_MULTIPLE: Final = re.compile(r"multipleOf|multiple_of|\\+u00(?i:24|4f|5f|6[1569cdef]|7[0245])")
_QUICK_MULTIPLE: Final = re.compile(r'multipleOf\\*"\s*:\s*(\d{1,3}|0\.\d{1,3})(?=[\s,}])')
_LARK: Final = re.compile(r'"lark_grammar"\s*:\s*"')
_PATTERN: Final = re.compile(r'"pattern\\*"\s*:')
# Patterns that all have to match one text: each may double the time and memory, which llguidance bounds for none of them. 12
# take about 10 ms, 20 take 2 s and 0.2 GB.
_FEW_PATTERNS: Final = 4
# Of these, each part beside others takes about 0.2 ms, and twice as much where it counts twice; 200 take up to 50 ms.
_COSTLY: Final = re.compile(
    r'"(?:(?:exclusive)?M(?:in|ax)imum|M(?:in|ax)Length|pattern|(format|not))\\*"\s*:', re.IGNORECASE
)
_FEW_COSTLY: Final = 200
_COUNTED: Final = re.compile(r"\{\d*,\d*\}")
_FEW_COUNTED: Final = 150  # ranges of counts in Lark: 150 in one rule take 35 ms, 800 take 0.9 s


def may_take_long(grammar: str) -> bool:
    """Whether no limit of llguidance keeps a check of the grammar brief, nor its compilation."""
    return len(grammar) > BRIEF_CHARS or _has_many_costly(grammar) or is_unbounded(grammar)


def _has_many_costly(grammar: str) -> bool:
    counted = len(_COUNTED.findall(grammar)) if _LARK.search(grammar) is not None else 0
    doubles = _COSTLY.findall(grammar)
    return counted > _FEW_COUNTED or len(doubles) + sum(map(bool, doubles)) > _FEW_COSTLY


def is_unbounded(grammar: str) -> bool:
    """Whether llguidance's limits do not bound the time of a check: it may take seconds, others up to some tenths of one."""
    # In Lark, "&" and "~" join terminals.
    joins = ("&" in grammar or "~" in grammar) and _LARK.search(grammar) is not None
    return joins or has_slow_part(grammar)


def has_slow_part(text: str) -> bool:
    """Whether a schema in the text may need more time and memory than llguidance's limits allow."""
    quick = _QUICK_MULTIPLE.findall(text)
    if len(quick) < len(_MULTIPLE.findall(text)) or len(set(quick)) > 1:
        return True
    return ("allOf" in text or "$ref" in text) and len(_PATTERN.findall(text)) > _FEW_PATTERNS
