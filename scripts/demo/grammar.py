"""The templates of the demo corpus: alternatives in brackets, slots in braces.

    expand(rng, "[Hi|Hello], {name}!", name="Ann")   ->   "Hello, Ann!"

Brackets may nest. An alternative may be empty. Knows nothing of facts, stories or the chat format.
"""

import random
import re

_INNERMOST = re.compile(r"\[([^\[\]]*)\]")


def expand(rng: random.Random, template: str, /, **slots: object) -> str:
    """One random sentence of `template`: expands the innermost brackets first, then fills in the slots."""
    while match := _INNERMOST.search(template):
        choice = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    return template.format(**slots) if slots else template


def a(noun: str) -> str:
    """The noun with its indefinite article, by spelling: "a fox", "an owl"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    """The text with a capital first letter (the rest untouched, unlike str.capitalize)."""
    return text[:1].upper() + text[1:]
