"""Error messages for regular expressions and Lark grammars that llguidance refuses, which quote nothing of the request.

Errors of this server never repeat a request, but llguidance's messages quote the source. Only llguidance's own words, which are
in the tables below, and places are taken over from them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_REGEX_ERROR: Final = re.compile(r"regex parse error:\n    [^\n]*\n    ( *)\^[ ^]*\nerror: ([^\n]*)")
# Of the crate regex-syntax, which llguidance uses.
_REGEX_WORDS: Final = frozenset(
    {"backreferences are not supported", "dangling flag negation operator", "decimal literal empty",
     "decimal literal invalid", "duplicate capture group name", "duplicate flag", "empty capture group name",
     "expected flag but got end of regex", "flag negation operator repeated", "hexadecimal literal empty",
     "hexadecimal literal is not a Unicode scalar value", "incomplete escape sequence, reached end of pattern prematurely",
     "invalid capture group character", "invalid character class range, the start must be <= the end",
     "invalid escape sequence found in character class", "invalid hexadecimal digit",
     "invalid range boundary, must be a literal", "invalid repetition count range, the start must be <= the end",
     "look-around, including look-ahead and look-behind, is not supported", "pattern can match invalid UTF-8",
     "repetition operator missing expression", "repetition quantifier expects a valid decimal",
     "unclosed capture group name", "unclosed character class", "unclosed counted repetition", "unclosed group",
     "Unicode not allowed here", "Unicode property not found", "Unicode property value not found", "unopened group",
     "Unicode-aware Perl class not found", "unrecognized escape sequence", "unrecognized flag"}
)  # fmt: skip
_AT: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
# The beginning of a message, and what is said of the place instead.
_LARK_WORDS: Final = (
    ("unknown name:", "a rule or a terminal has no definition"),
    ("unknown grammar", "a grammar that it refers to does not exist"),
    ("unknown special token", "the vocabulary has no such control token"),
    ("lexer error", "the syntax is not valid here"),
    ("lexer special token", "the syntax is not valid here"),
    ("range end must be", "the end of a repetition is below its start"),
    ("range start must be", "the start of a repetition is below 0"),
    ("duplicate rule", "the rule is defined twice"),
    ("duplicate token", "the terminal is defined twice"),
    ("circular reference", "the terminal refers to itself"),
    ("Unknown common regex", "the imported terminal does not exist"),
    ("failed to parse %llguidance", "the options behind %llguidance are not valid"),
    ("failed to parse %regex", "what is behind %regex is not valid"),
    ('failed to parse "%', "what is behind a % is not valid JSON"),
    ("no start rule", "no rule has the name start"),
    ("lark grammar too deeply nested", "it is nested too deep"),
    ("Expected", "the syntax is not valid here"),
    ("expected", "the syntax is not valid here"),
    ("expecting", "the syntax is not valid here"),
    ("at EOF", "the text ends within a rule"),
    ("Unexpected", "the syntax is not valid here"),
    ("error parsing string", "the text in quotes is not valid"),
    ("invalid range order", "the end of a range is below its start"),
    ("number too large", "a number is too large"),
    ("special tokens", "a terminal cannot have control tokens"),
    ("Empty grammar", "it is empty"),
)
_UNSUPPORTED: Final = re.compile(r"[^:\n\"']*\bnot supported\b|[^:\n\"']*cannot be used\b")
_SIZE: Final = re.compile(r"[^\n\"']*(?:fuel\b|limit\b|stack level|too (?:large|big|complex|many))")
_BEYOND_LIMITS: Final = re.compile(
    r"(?:lexer|parser) error: too many |parser error: current row has |initial lexer configuration .*too big",
    re.IGNORECASE,
)
_SCHEMA: Final = "failed to compile JSON schema: "


@dataclass(frozen=True, slots=True)
class RegexFault:
    """character: its number in the expression, from 1; None where it is not known. words: what is wrong, or ""."""

    character: int | None
    words: str

    @property
    def reason(self) -> str:
        where = "" if self.character is None else f" at character {self.character}"
        return f"is not a regular expression that can be followed{where}{self.words and ': '}{self.words}"


def regex_fault(problem: str, regex: str, compiled_as: Callable[[str], str]) -> RegexFault:
    """What is wrong with `regex`, of which llguidance compiled `compiled_as(regex)`."""
    found = _REGEX_ERROR.search(problem)
    if found is None:
        return RegexFault(None, "a word boundary is not supported" if "lookarounds not supported" in problem else "")
    words = found[2] if found[2] in _REGEX_WORDS else ""
    return RegexFault(_index_of(len(found[1]), regex, compiled_as) + 1, words)


def _index_of(column: int, regex: str, compiled_as: Callable[[str], str]) -> int:
    """The index in `regex` of what is at `column` of its compiled form."""
    low, high = 0, len(regex)  # the compiled form of the first `low` characters ends at the column or before it
    while low < high:
        middle = (low + high + 1) // 2
        if len(compiled_as(regex[:middle])) <= column:
            low = middle
        else:
            high = middle - 1
    is_escaped = low > 0 and len(compiled_as(regex[: low - 1])) == len(compiled_as(regex[:low]))
    return low - 1 if is_escaped else low


def is_too_large(problem: str) -> bool:
    """Whether a limit of time or memory ended the compiling."""
    return _SIZE.match(problem) is not None


def is_beyond_limits(problem: str) -> bool:
    """Whether a limit of time or memory ended the matching."""
    return _BEYOND_LIMITS.match(problem) is not None


def is_empty(problem: str) -> bool:
    """Whether the matching ended because nothing can continue the text, which is not complete."""
    return problem.startswith("NoExtensionBias")


def lark_reason(problem: str, source: str, schema_reason: Callable[[str], str]) -> str:
    """What is wrong with `source`, a grammar in Lark, by line and column from 1. schema_reason: in words, llguidance's problem
    with a JSON schema."""
    at = lark_place(problem)
    reason = lark_words(problem, schema_reason)
    if at is None:
        return reason
    line, byte = at
    lines = source.split("\n")
    before = lines[line - 1].encode(errors="replace")[: byte - 1] if line <= len(lines) else b""
    return f"line {line}, column {len(before.decode(errors='ignore')) + 1}: {reason}"


def lark_place(problem: str) -> tuple[int, int] | None:
    """The line and its byte, from 1, that llguidance's message begins with."""
    at = _AT.match(problem)
    return None if at is None else (int(at[1]), int(at[2]))


def lark_words(problem: str, schema_reason: Callable[[str], str]) -> str:
    """The problem without its place."""
    problem = problem[at.end() :] if (at := _AT.match(problem)) else problem
    if is_beyond_limits(problem):
        return "the grammar is too large or too complex"
    if is_empty(problem):
        return "nothing can continue the text, which is not complete"
    if problem.startswith(_SCHEMA):
        return f"a JSON schema cannot be followed: {schema_reason(problem.removeprefix(_SCHEMA))}"
    if problem.startswith("invalid regex "):
        words = regex_fault(problem, "", str).words
        return f"a regular expression cannot be followed{words and ': '}{words}"
    for beginning, words in _LARK_WORDS:
        if problem.startswith(beginning):
            return words
    if is_too_large(problem):
        return "the grammar is too large or too complex"
    if _UNSUPPORTED.match(problem):
        return "this form of Lark is not supported"
    return "the grammar cannot be compiled"
