"""Turns the tables of facts.py into exchanges: a question as people type it, the answer, and the brief answer.

One function per topic, each drawing one exchange. TOPICS gives their shares. Answers hardly vary, questions vary a lot:
the model should be sure of what it says however it is asked.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import facts
from grammar import a, expand, sentence
from stories import BOYS, GIRLS, HEROES, NAMES


@dataclass(frozen=True)
class Exchange:
    """A question and its answer. `follow_ups` are questions that make sense only after this exchange."""

    user: str
    answer: str
    brief: str
    follow_ups: tuple[tuple[str, str, str], ...] = ()


def _ask(rng: random.Random, alternatives: str) -> str:
    """One of the alternatives separated by "|" outside brackets, expanded."""
    return expand(rng, f"[{alternatives}]")


def _question(text: str) -> str:
    """Add the punctuation mark: commands end in a full stop."""
    command = text.lower().startswith(
        ("tell", "explain", "name", "list", "introduce", "describe", "say", "recite", "help")
    )
    return text if text[-1] in ".!?:" else text + ("." if command else "?")


def capital(rng: random.Random) -> Exchange:
    country, other = rng.sample(list(facts.CAPITALS), 2)
    city = facts.CAPITALS[country]
    if rng.random() < 0.15:
        ask = expand(
            rng,
            "[{c} is the capital of which country|Which country has {c} as its capital|Of which country is "
            "{c} the capital|What country is {c} the capital of|Where is {c}|In which country is {c}]?",
            c=city,
        )
        if city == "London":
            country = "England"
        if "here is" in ask or "In which" in ask:
            return Exchange(ask, f"{city} is the capital of {country}.", f"In {country}.")
        return Exchange(ask, f"{city} is the capital of {country}.", f"{sentence(country)}.")
    ask = expand(
        rng,
        "[What is the capital of {c}?|What is the capital of {c}?|What is the capital of {c}?|What's the capital of "
        "{c}?|"
        "Tell me the capital of {c}.|Name the capital of {c}.|What is the capital city of {c}?|Which city is the "
        "capital "
        "of {c}?|Capital of {c}?|Do you know the capital of {c}?|{c} capital?|the capital of {c} is|Can you tell me "
        "the "
        "capital of {c}?|I want to know the capital of {c}.|What is {c}'s capital?]",
        c=country,
    )
    follow = expand(rng, "[And of|And|What about|And what about|How about|And the capital of] {c}?", c=other)
    there = facts.CAPITALS[other]
    return Exchange(
        ask,
        f"The capital of {country} is {_stop(city)}",
        _stop(city),
        ((follow, f"The capital of {other} is {_stop(there)}", _stop(there)),),
    )


def _stop(text: str) -> str:
    """Add a full stop unless there is one: "Washington, D.C." has its own."""
    return text if text.endswith(".") else text + "."


def unknown_capital(rng: random.Random) -> Exchange:
    place = rng.choice(facts.UNKNOWN_PLACES) if rng.random() < 0.6 else sentence(_pseudo_word(rng))
    ask = expand(
        rng,
        "[What is the capital of {c}?|What's the capital of {c}?|Capital of {c}?|Tell me the capital of {c}.|"
        "What is the capital city of {c}?]",
        c=place,
    )
    known = "I do not know that capital. I know the capitals of some countries, such as France, Japan and Peru."
    return Exchange(ask, known, "I do not know.")


def continent(rng: random.Random) -> Exchange:
    where = rng.choice(list(facts.CONTINENTS))
    country = rng.choice(
        [c for c in facts.CAPITALS if c.removeprefix("the ") in facts.CONTINENTS[where].split()] or ["France"]
    )
    if country == "France":
        where = "Europe"
    ask = expand(
        rng,
        "[Where is {c}?|On which continent is {c}?|Which continent is {c} in?|Where is the country {c}?]",
        c=country,
    )
    return Exchange(ask, f"{country} is in {where}.", f"In {where}.")


def language(rng: random.Random) -> Exchange:
    country, tongue = rng.choice(list(facts.LANGUAGES.items()))
    ask = expand(
        rng,
        "[What language do people speak in {c}?|Which language do people speak in {c}?|What language is spoken in "
        "{c}?|Which language is spoken in {c}?|What do they speak in {c}?]",
        c=country,
    )
    return Exchange(ask, f"In {country} people speak {tongue}.", f"{tongue}.")


def greeting_abroad(rng: random.Random) -> Exchange:
    tongue, words = rng.choice(list(facts.GREETINGS_ABROAD.items()))
    english, index = rng.choice((("hello", 0), ("hello", 0), ("thank you", 1)))
    ask = expand(
        rng,
        "[How do you say {e} in {t}?|What is {e} in {t}?|Say {e} in {t}.|Translate {e} into {t}.|Translate "
        "{e} to {t}.|How do I say {e} in {t}?]",
        e=english,
        t=tongue,
    )
    word = words[index]
    return Exchange(ask, f"In {tongue} you say: {word}.", f"{sentence(word)}.")


def animal(rng: random.Random) -> Exchange:
    name = rng.choice(list(facts.ANIMALS))
    verb, says, legs, young, home, food, cover, kind = facts.ANIMALS[name]
    many = facts.PLURALS.get(name, name + "s")
    an = a(name)
    what = rng.choice(("sound", "sound", "legs", "young", "home", "food", "cover", "kind", "is"))
    if what == "sound":
        ask = expand(
            rng,
            "[What does {an} say?|What sound does {an} make?|What noise does {an} make?|How does {an} sound?|"
            "What do {many} say?|Which sound does {an} make?|What does the {name} say?]",
            an=an,
            many=many,
            name=name,
        )
        return Exchange(ask, f"{sentence(an)} {verb}: {says}!", f"{sentence(says)}!")
    if what == "legs":
        return _legs(rng, name, int(legs))
    if what == "young":
        ask = expand(
            rng,
            "[What is a baby {name} called?|What do you call a baby {name}?|What is a young {name} called?|What is "
            "the name of a baby {name}?]",
            name=name,
        )
        return Exchange(ask, f"A young {name} is called {a(young)}.", f"{sentence(a(young))}.")
    if what == "home":
        ask = expand(rng, "[Where does {an} live?|Where do {many} live?|Where can I find {an}?]", an=an, many=many)
        return Exchange(ask, f"{sentence(an)} lives {home}.", f"{sentence(home)}.")
    if what == "food":
        ask = expand(
            rng,
            "[What does {an} eat?|What do {many} eat?|What do {many} like to eat?|What is the food of {an}?]",
            an=an,
            many=many,
        )
        return Exchange(ask, f"{sentence(an)} eats {food}.", f"{sentence(food)}.")
    if what == "cover":
        ask = expand(rng, "[What covers {an}?|What is {an} covered with?|Does {an} have fur or feathers?]", an=an)
        return Exchange(ask, f"{sentence(an)} has {cover}.", f"{sentence(cover)}.")
    if what == "kind":
        ask = expand(
            rng,
            "[What kind of animal is {an}?|What sort of animal is {an}?|What is {an}?|Tell me about "
            "{many}.|Tell me about the {name}.]",
            an=an,
            many=many,
            name=name,
        )
        lives = f"{sentence(an)} is {a(kind)}. It lives {home} and eats {food}."
        return Exchange(ask, lives, f"{sentence(a(kind))}.")
    other = rng.choice(("mammal", "bird", "insect", "reptile", "animal"))
    ask = f"Is {an} {a(other)}?"
    if other in (kind, "animal"):
        return Exchange(ask, f"Yes, {an} is {a(other)}.", "Yes.")
    return Exchange(ask, f"No, {an} is {a(kind)}.", "No.")


def _legs(rng: random.Random, name: str, legs: int) -> Exchange:
    ask = expand(
        rng,
        "[How many legs does {an} have?|How many legs has {an}?|How many legs does {an} have?|How many feet does {an} "
        "have?|Number of legs of {an}?]",
        an=a(name),
    )
    if name == "person":
        ask = "How many legs does a person have?"
    noun = "feet" if "feet" in ask else "legs"
    return Exchange(ask, f"{sentence(a(name))} has {legs or 'no'} {noun}.", f"{legs or 'None'}.")


def more_legs(rng: random.Random) -> Exchange:
    name, legs = rng.choice(list(facts.MORE_LEGS.items()))
    return _legs(rng, name, legs)


def unknown_animal(rng: random.Random) -> Exchange:
    name = rng.choice(facts.UNKNOWN_ANIMALS) if rng.random() < 0.6 else _pseudo_word(rng)
    ask = expand(
        rng,
        "[What does {an} eat?|What sound does {an} make?|Where does {an} live?|What is {an}?|What is a baby {name} "
        "called?|How many legs does {an} have?]",
        an=a(name),
        name=name,
    )
    known = "I do not know that animal well. I know dogs, cats, cows, foxes, lions and some more."
    return Exchange(ask, known, "I do not know.")


def colour(rng: random.Random) -> Exchange:
    spelling = rng.choice(("colour", "color"))
    if rng.random() < 0.2:
        (one, two), mixed = rng.choice(list(facts.MIXES.items()))
        if rng.random() < 0.5:
            one, two = two, one
        ask = expand(
            rng,
            "[What do you get when you mix {one} and {two}?|What {s} do {one} and {two} make?|Mix {one} and "
            "{two}.|What "
            "is {one} and {two} mixed?|What {s} is {one} plus {two}?]",
            one=one,
            two=two,
            s=spelling,
        )
        return Exchange(ask, f"{sentence(one)} and {two} make {mixed}.", f"{sentence(mixed)}.")
    thing, name = rng.choice(list(facts.COLOURS.items()))
    ask = expand(
        rng,
        "[What {s} is {t}?|What {s} is {t}?|Which {s} is {t}?|What is the {s} of {t}?|Tell me the {s} of {t}.|What {s} "
        "does {t} have?]",
        s=spelling,
        t=thing,
    )
    other, name2 = rng.choice(list(facts.COLOURS.items()))
    follow = expand(rng, "[And|What about|And what about|How about] {t}?", t=other)
    if rng.random() < 0.15:
        guess = rng.choice((name, rng.choice(facts.COLOUR_NAMES)))
        if guess == name:
            return Exchange(f"Is {thing} {guess}?", f"Yes, {thing} is {name}.", "Yes.")
        if guess not in name:
            return Exchange(f"Is {thing} {guess}?", f"No, {thing} is {name}.", "No.")
    return Exchange(
        ask,
        f"{sentence(thing)} is {name}.",
        f"{sentence(name)}.",
        ((follow, f"{sentence(other)} is {name2}.", f"{sentence(name2)}."),),
    )


def opposite(rng: random.Random) -> Exchange:
    if rng.random() < 0.06:
        word = rng.choice(facts.UNKNOWN_OPPOSITES) if rng.random() < 0.6 else _pseudo_word(rng)
        answer = "I do not know an opposite of that word. Try hot, big, happy or early."
        return Exchange(f"What is the opposite of {word}?", answer, "I do not know.")
    pairs = rng.sample(facts.OPPOSITES, 2)
    # "light" and "short" have two opposites each: questions use only the unambiguous direction.
    (one, two), (three, four) = (
        pair if pair[1] in ("light", "short", "north", "east") or rng.random() < 0.5 else pair[::-1] for pair in pairs
    )
    one, two = {("light", "heavy"): ("heavy", "light"), ("short", "tall"): ("tall", "short")}.get(
        (one, two), (one, two)
    )
    if two == "light" and one == "dark":
        one, two = "dark", "light"
    if (one, two) == ("light", "dark") or one == "short" or three in ("light", "short"):
        one, two, three, four = "hot", "cold", "big", "small"
    if one in ("old", "new"):
        one, two = ("new", "old") if two != "young" else ("young", "old")
    if three == "old":
        three, four = "young", "old"
    ask = expand(
        rng,
        "[What is the opposite of {w}?|What is the opposite of {w}?|What's the opposite of {w}?|Tell me the opposite "
        "of "
        "{w}.|Opposite of {w}?|Which word is the opposite of {w}?|the opposite of {w} is|Give me the opposite of "
        "{w}.|What is the opposite of the word {w}?]",
        w=one,
    )
    follow = expand(rng, "[And of|And|What about|And the opposite of] {w}?", w=three)
    return Exchange(
        ask,
        f"The opposite of {one} is {two}.",
        f"{sentence(two)}.",
        ((follow, f"The opposite of {three} is {four}.", f"{sentence(four)}."),),
    )


def calendar(rng: random.Random) -> Exchange:
    names, noun = (facts.DAYS, "day") if rng.random() < 0.55 else (facts.MONTHS, "month")
    index = rng.randrange(len(names))
    step = rng.choice((1, 1, -1))
    word = "after" if step == 1 else "before"
    this, that = names[index], names[(index + step) % len(names)]
    kind = rng.random()
    if kind < 0.15 and noun == "day":
        tomorrow = names[(index + 1) % 7]
        return Exchange(
            f"If today is {this}, what day is tomorrow?", f"If today is {this}, tomorrow is {tomorrow}.", f"{tomorrow}."
        )
    ask = expand(
        rng,
        "[What {n} comes {w} {d}?|Which {n} comes {w} {d}?|What {n} is {w} {d}?|Which {n} is {w} {d}?|What "
        "comes {w} {d}?|What is the {n} {w} {d}?]",
        n=noun,
        w=word,
        d=this,
    )
    return Exchange(ask, f"{that} comes {word} {this}.", f"{that}.")


def counted(rng: random.Random) -> Exchange:
    ask, number, answer = rng.choice(facts.COUNTS)
    ask = expand(rng, "[How many {q}?|How many {q}?|Tell me how many {q}.|Do you know how many {q}?]", q=ask)
    return Exchange(ask, answer, f"{number}.")


def knowledge(rng: random.Random) -> Exchange:
    asks, answer, brief = rng.choice(facts.KNOWLEDGE)
    return Exchange(sentence(_question(_ask(rng, asks))), answer, brief)


def self_talk(rng: random.Random) -> Exchange:
    asks, answer, brief = rng.choice(facts.SELF)
    return Exchange(sentence(_question(_ask(rng, asks))), answer, brief)


def remark(rng: random.Random) -> Exchange:
    # Greetings stand first in the table, because most dialogs begin with one.
    asks, answer = facts.REMARKS[0] if rng.random() < 0.25 else rng.choice(facts.REMARKS)
    ask = sentence(_ask(rng, asks))
    return Exchange(ask + rng.choice((".", "!", "", "") if ask[-1].isalnum() else ("",)), answer, answer)


def name_game(rng: random.Random) -> Exchange:
    name = rng.choice(NAMES)
    ask = expand(
        rng,
        "[My name is {n}|I am {n}|I'm {n}|Hi, I am {n}|Hello, my name is {n}|Hello, I am {n}|You can call me {n}|Hi! "
        "My "
        "name is {n}]",
        n=name,
    ) + rng.choice((".", ".", "!", ""))
    follow = rng.choice(
        ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Do you know my name?")
    )
    again = (follow, f"Your name is {name}.", f"{name}.")
    answer = f"Hello, {name}! How can I help you?"
    return Exchange(ask, answer, answer, (again,))


def unknown_name(rng: random.Random) -> Exchange:
    ask = rng.choice(("What is my name?", "Who am I?", "Do you know my name?"))
    return Exchange(ask, "I do not know your name yet. What is it?", "I do not know.")


def _sum(rng: random.Random) -> tuple[str, str, int]:
    """(expression with a sign, the same in words, result). Terms are at most 20, factors at most 10."""
    kind = rng.random()
    if kind < 0.5:
        x, y = rng.randint(0, 20), rng.randint(0, 20)
        return f"{x} + {y}", f"{x} {rng.choice(('plus', 'plus', 'and'))} {y}", x + y
    if kind < 0.72:
        x, y = rng.randint(0, 20), rng.randint(0, 20)
        x, y = max(x, y), min(x, y)
        return f"{x} - {y}", f"{x} minus {y}", x - y
    x, y = rng.randint(0, 10), rng.randint(1, 10)
    if kind < 0.93:
        return f"{x} {rng.choice('***x×')} {y}", f"{x} times {y}", x * y
    return f"{x * y} / {y}", f"{x * y} divided by {y}", x


def arithmetic(rng: random.Random) -> Exchange:
    """The answer repeats the whole sum in signs, so that the model writes it before the result."""
    if rng.random() < 0.08:
        return _word_problem(rng)
    signs, words, result = _sum(rng)
    form = signs if rng.random() < 0.65 else words
    if rng.random() < 0.15:
        form = form.replace(" ", "") if form == signs else form
    ask = expand(
        rng,
        "[What is {f}?|What is {f}?|What is {f}?|{f}|{f} =|{f} = ?|{f}?|What's {f}?|How much is {f}?|Calculate "
        "{f}.|Can you tell me "
        "what {f} is?|Compute {f}.|Add up: {f}|Solve {f}|What does {f} make?|Please calculate {f}.|{f}=?|what is {f} "
        "equal to?]",
        f=form,
    )
    clean = signs.replace("x", "*").replace("×", "*")
    signs2, words2, result2 = _sum(rng)
    follow = expand(rng, "[And|What about|And what is|Now] {f}?", f=rng.choice((signs2, words2)))
    clean2 = signs2.replace("x", "*").replace("×", "*")
    return Exchange(ask, f"{clean} = {result}", f"{result}", ((follow, f"{clean2} = {result2}", f"{result2}"),))


def _word_problem(rng: random.Random) -> Exchange:
    x, y = rng.randint(1, 10), rng.randint(1, 10)
    what = rng.choice(("apples", "pears", "books", "balls", "nuts", "coins", "eggs", "cookies"))
    name = rng.choice(NAMES)
    if rng.random() < 0.5:
        ask = "{n} has {x} {w} and gets {y} more. How many {w} does {n} have?|"
        ask += "I have {x} {w} and get {y} more. How many {w} do I have?"
        signs, result = f"{x} + {y}", x + y
    else:
        x, y = max(x, y), min(x, y)
        ask = "{n} has {x} {w} and eats {y}. How many {w} are left?|"
        ask += "I have {x} {w} and give away {y}. How many {w} do I have left?"
        signs, result = f"{x} - {y}", x - y
    return Exchange(expand(rng, f"[{ask}]", n=name, x=x, y=y, w=what), f"{signs} = {result}", f"{result}")


def number_sense(rng: random.Random) -> Exchange:
    kind = rng.random()
    if kind < 0.3:
        x, y = rng.sample(range(0, 31), 2)
        big = rng.random() < 0.6
        ask = expand(
            rng,
            "[Which is {w}, {x} or {y}?|Which number is {w}, {x} or {y}?|What is {w}: {x} or {y}?]",
            w=rng.choice(("bigger", "larger", "greater")) if big else "smaller",
            x=x,
            y=y,
        )
        best, rest = (max(x, y), min(x, y)) if big else (min(x, y), max(x, y))
        return Exchange(ask, f"{best} is {'bigger' if big else 'smaller'} than {rest}.", f"{best}.")
    if kind < 0.5:
        x = rng.randint(0, 50)
        parity = "even" if x % 2 == 0 else "odd"
        ask = expand(rng, "[Is {x} even or odd?|Is {x} odd or even?|Is the number {x} even?]", x=x)
        return Exchange(ask, f"{x} is {parity}.", f"{sentence(parity)}.")
    if kind < 0.7:
        x = rng.randint(0, 40)
        ask = expand(rng, "[What number comes after {x}?|Which number comes after {x}?|What comes after {x}?]", x=x)
        return Exchange(ask, f"{x + 1} comes after {x}.", f"{x + 1}.")
    if kind < 0.9:
        # Outside the tables: a term above 20 or a factor above 10.
        sign = rng.choice(("+", "-", "*", "+", "-", "times", "plus"))
        smallest = 11 if sign in ("*", "times") else 21
        x = rng.randint(smallest, rng.choice((99, 99, 999, 99999)))
        y = rng.randint(1, rng.choice((20, 99, 9999)))
        if rng.random() < 0.5:
            x, y = y, x
        forms = ("What is {} {} {}?", "What is {} {} {}?", "{} {} {}", "Calculate {} {} {}.", "{} {} {} =")
        ask = rng.choice(forms).format(x, sign, y)
        answer = "Those numbers are too big for me. I can do small sums, like 7 + 5 = 12."
        return Exchange(ask, answer, "That is too big for me.")
    x = rng.randint(0, 20)
    ask = expand(rng, "[Write the number {x} in words.|How do you write {x} in words?|What is {x} in words?]", x=x)
    return Exchange(ask, f"{x} in words is {facts.NUMBER_WORDS[x]}.", f"{sentence(facts.NUMBER_WORDS[x])}.")


def counting(rng: random.Random) -> Exchange:
    end = rng.choice((3, 5, 5, 10, 10, 10, 20, rng.randint(2, 20)))
    start = 1 if rng.random() < 0.7 else rng.randint(1, 10)
    end = max(end, start + 2)
    if rng.random() < 0.2:
        start, end = end, 1
        ask = expand(
            rng,
            "[Count down from {s}.|Count backwards from {s}.|Count from {s} to 1.|Count from {s} down to 1.]",
            s=start,
        )
        numbers = range(start, 0, -1)
    else:
        ask = expand(
            rng, "[Count from {s} to {e}.|Count from {s} to {e}|Can you count from {s} to {e}?]", s=start, e=end
        )
        if start == 1:
            ask = expand(
                rng, "[Count to {e}.|Please count to {e}.|Can you count to {e}?|Count up to {e}.|{a}|{a}]", e=end, a=ask
            )
        numbers = range(start, end + 1)
    answer = ", ".join(map(str, numbers)) + "."
    return Exchange(ask, answer, answer)


def listing(rng: random.Random) -> Exchange:
    kind, items = rng.choice(list(facts.LISTS.items()))
    count = rng.choice((2, 3, 3, 3, 4, 5))
    how = rng.choice((str(count), facts.NUMBER_WORDS[count]))
    ask = expand(
        rng,
        "[Name {n} {k}.|List {n} {k}.|Tell me {n} {k}.|Give me {n} {k}.|Can you name {n} {k}?|Give me a list of {n} "
        "{k}.|"
        "Write a list of {n} {k}.]",
        n=how,
        k=kind,
    )
    chosen = items[:count]
    head, tail = ", ".join(chosen[:-1]), chosen[-1]
    text = f"{head} and {tail}"
    return Exchange(ask, f"{sentence(text)}.", f"{sentence(text)}.")


def words(rng: random.Random) -> Exchange:
    """Spelling, letters, plurals, past tenses, rhymes, repetition."""
    kind = rng.choice(("spell", "letter", "plural", "past", "rhyme", "repeat", "repeat", "sentence"))
    if kind == "spell":
        word = rng.choice(facts.SPELL)
        ask = expand(rng, "[How do you spell {w}?|Spell {w}.|Spell the word {w}.|Can you spell {w}?]", w=word)
        return Exchange(ask, "-".join(word), "-".join(word))
    if kind == "letter":
        index = rng.randrange(25)
        letter, following = facts.ALPHABET[index], facts.ALPHABET[index + 1]
        ask = expand(
            rng,
            "[What letter comes after {x}?|Which letter comes after {x}?|What comes after the letter {x}?]",
            x=letter,
        )
        return Exchange(ask, f"The letter {following} comes after {letter}.", f"{following}.")
    if kind == "plural":
        one, many = rng.choice(list(facts.PLURAL_NOUNS.items()))
        ask = expand(rng, "[What is the plural of {w}?|Plural of {w}?|Tell me the plural of {w}.]", w=one)
        return Exchange(ask, f"The plural of {one} is {many}.", f"{sentence(many)}.")
    if kind == "past":
        now, then = rng.choice(list(facts.PAST_TENSES.items()))
        ask = expand(rng, "[What is the past tense of {w}?|Past tense of {w}?|What is the past of {w}?]", w=now)
        return Exchange(ask, f"The past tense of {now} is {then}.", f"{sentence(then)}.")
    if kind == "rhyme":
        word, rhyme = rng.choice(list(facts.RHYMES.items()))
        ask = expand(
            rng,
            "[What rhymes with {w}?|Which word rhymes with {w}?|Give me a rhyme for {w}.|Find a rhyme for {w}.]",
            w=word,
        )
        return Exchange(ask, f"{sentence(rhyme)} rhymes with {word}.", f"{sentence(rhyme)}.")
    if kind == "repeat":
        word = rng.choice((*facts.SPELL, *HEROES, *facts.COLOUR_NAMES, *NAMES, *facts.DAYS))
        if rng.random() < 0.4:
            word = f"the {rng.choice(HEROES)} is {rng.choice(('happy', 'small', 'big', 'red', 'blue', 'sad', 'here'))}"
        elif rng.random() < 0.2:
            word = _pseudo_word(rng)
        ask = expand(rng, "[Say|Please say|Repeat|Repeat after me:|Can you say|Write] {w}", w=word)
        return Exchange(ask + rng.choice((".", "", "!")), _stop(sentence(word)), _stop(sentence(word)))
    noun = rng.choice(HEROES)
    ask = expand(
        rng,
        "[Make a sentence with|Write a sentence with|Write a sentence about|Use in a sentence:] {w}.",
        w=rng.choice((noun, a(noun), f"the word {noun}")),
    )
    answer = f"The {noun} walked {rng.choice(('over the hill', 'through the forest'))} and sang a happy song."
    return Exchange(ask, answer, answer)


def writing(rng: random.Random) -> Exchange:
    """Jokes, facts, small poems, wishes."""
    kind = rng.choice(("joke", "fact", "poem", "poem", "birthday", "birthday"))
    if kind == "joke":
        ask = expand(
            rng,
            "[Tell me a joke|Tell a joke|Do you know a joke|Make me laugh|Say something funny|Another joke|A joke, "
            "please|"
            "Tell me a funny joke|Can you tell me a joke|joke]",
        )
        joke = rng.choice(facts.JOKES)
        another = next(j for j in rng.sample(facts.JOKES, 2) if j != joke)
        return Exchange(
            _question(ask) if ask[:2] in ("Do", "Ca") else ask + rng.choice((".", "")),
            joke,
            joke,
            (
                (
                    rng.choice(("Another one.", "Tell me another one.", "One more.", "Another joke, please.")),
                    another,
                    another,
                ),
            ),
        )
    if kind == "fact":
        ask = expand(
            rng, "[Tell me a fact|Tell me a fun fact|Give me a fact|Tell me something interesting|Teach me something]"
        )
        answer = rng.choice(
            (
                "Bees make honey.",
                "The largest animal is the blue whale.",
                "A young llama is called a cria.",
                "Ice is frozen water.",
                "The fastest animal on land is the cheetah.",
            )
        )
        answer = "Did you know? " + answer
        return Exchange(ask + rng.choice((".", "", "!")), answer, answer)
    if kind == "poem":
        noun = (
            rng.choice(HEROES)
            if rng.random() < 0.7
            else rng.choice(("sea", "moon", "rain", "tree", "summer night", "sun", "winter", "river"))
        )
        ask = expand(
            rng,
            "[Write|Tell me|Write me|Give me|Can you write|Please write] a [|short |little ]poem about {w}",
            w=rng.choice((a(noun), f"the {noun}")),
        )
        answer = (
            f"The {noun} woke up and saw the light,\nThe sky was blue, the day was bright.\n"
            f"The {noun} sang a song so clear,\nThat all the world came near to hear."
        )
        return Exchange(ask + rng.choice((".", "", "?" if ask[:3] == "Can" else ".")), answer, answer)
    name = rng.choice((*GIRLS, *BOYS))
    ask = expand(
        rng,
        "[Write|Please write|Write me|Can you write] a [brief |short |]birthday [message|card|wish] [to|for] {n}",
        n=name,
    )
    answer = f"Happy birthday, {name}! I wish you a day full of joy, cake and good friends."
    return Exchange(ask + rng.choice((".", "")), answer, answer)


_REFUSALS = (
    "I am a very small demo model, so I do not know that. Try asking me about animals, colours, capitals or small "
    "sums, or ask for a "
    "story.",
    "Sorry, that is too hard for me: I am only a tiny demo model. Ask me for the capital of Italy, the opposite of "
    "hot or a story "
    "about a fox.",
)


def _pseudo_word(rng: random.Random) -> str:
    """A word that is in no list, so that the model cannot rely on having seen it."""
    syllables = (
        "".join((rng.choice("bcdfghjklmnprstvwz"), rng.choice("aeiou"), rng.choice(("", "", "n", "r", "s", "l", "t"))))
        for _ in range(9)
    )
    return "".join(s for s, _ in zip(syllables, range(rng.randint(2, 4)), strict=False))


def beyond(rng: random.Random) -> Exchange:
    """Questions outside the tables, and the answer that the model does not know."""
    topic = rng.choice(facts.TOPICS) if rng.random() < 0.7 else _pseudo_word(rng)
    other = rng.choice(facts.TOPICS) if rng.random() < 0.7 else _pseudo_word(rng)
    year = rng.randint(1000, 2030)
    ask = expand(
        rng,
        "[What is {t}?|What is {t}?|What is {t}?|What are {t}?|Explain {t}.|Explain {t} to me.|Explain {t} like I am "
        "five.|How does {t} "
        "work?|How do {t} work?|Who invented {t}?|Who is {t}?|Who was {t}?|Tell me about {t}.|Tell me more about "
        "{t}.|Write an essay about "
        "{t}.|Write a paragraph on {t}.|Write code for {t}.|Write a Python function for {t}.|Write a program that "
        "uses {t}.|What do you think "
        "of {t}?|What do you think about {t}?|Can you help me with {t}?|I need help with {t}.|How do I learn {t}?|How "
        "can I get better at {t}?|"
        "Why is {t} important?|Why does {t} matter?|What is the difference between {t} and {o}?|Which is better, {t} "
        "or {o}?|Compare {t} and "
        "{o}.|Give me a recipe for {t}.|What is the recipe for {t}?|what is the recipe of {t}?|How do you make "
        "{t}?|How do I make {t}?|How do I "
        "cook {t}?|Translate {t} into German.|How do you say {t} in French?|Who won the {t} in {y}?|What happened in "
        "{y}?|What happened in "
        "{t} in {y}?|When did {t} begin?|When was {t} born?|Where can I buy {t}?|How much does {t} cost?|Where is "
        "{t}?|How far is it to {t}?|"
        "How do I get from {t} to {o}?|What is the price of {t}?|How old is {t}?|How tall is {t}?|What is the "
        "population of {t}?|Who wrote {t}?|"
        "Who is the president of {t}?|Summarize {t}.|Summarise the history of {t}.|What is the history of {t}?|Give "
        "me advice about {t}.|What "
        "are the benefits of {t}?|What causes {t}?|Is {t} dangerous?|Is {t} good for you?|Do you believe in {t}?|Do "
        "you like {t}?|Can you explain "
        "{t}?|What time is it?|What is the time?|What day is it today?|What is the date?|What is today's date?|What "
        "is the weather like?|How is the "
        "weather today?|Will it rain tomorrow?|Will {t} rise tomorrow?|Can you book a flight for me?|Send an email to "
        "{t}.|Open {t}.|Play {t}.|"
        "Search for {t}.|What is the meaning of {t}?|Define {t}.|What does {t} mean?|Should I buy {t}?|Write a letter "
        "about {t}.|Write an email about "
        "{t}.|Write a haiku about {t}.|Write a song about {t}.|Prove {t}.|Fix this code: {t}|How to go from {t} to "
        "{o}?|How many people live in "
        "{t}?|Name five kinds of {t}.|List the parts of {t}.|What is the best {t}?|Recommend {t}.|{t}|{t}?|{t} and "
        "{o}|How can I make money with "
        "{t}?|Debug {t}.|What would happen if {t} met {o}?|Describe {t}.|Was {t} right?|How is {t} made?|What are the "
        "rules of {t}?]",
        t=topic,
        o=other,
        y=year,
    )
    if rng.random() < 0.2:
        ask = expand(rng, rng.choice(facts.HARD_QUESTIONS), t=topic, o=other)
    elif rng.random() < 0.04:
        ask = rng.choice(
            (
                "¿Qué es esto?",
                "Was ist das?",
                "Qu'est-ce que c'est ?",
                "你好",
                "こんにちは",
                "Привет",
                "Wie geht es dir?",
                "Comment ça va ?",
                "asdf",
                "asdfgh",
                "qwerty",
                "???",
                "...",
                "!!!",
                "12345",
                "🙂",
                "👍",
                "xyz",
                "abc",
            )
        )
    return Exchange(sentence(ask), rng.choice(_REFUSALS), "I do not know.")


Topic = Callable[[random.Random], Exchange]
# The weight of each topic in a random choice.
TOPICS: dict[Topic, float] = {
    capital: 9,
    unknown_capital: 2,
    continent: 1.5,
    language: 1.5,
    greeting_abroad: 1.5,
    animal: 9,
    more_legs: 1.5,
    unknown_animal: 1.5,
    colour: 5,
    opposite: 5,
    calendar: 4,
    counted: 3,
    knowledge: 12,
    self_talk: 10,
    remark: 9,
    name_game: 7,
    unknown_name: 0.3,
    arithmetic: 34,
    number_sense: 6,
    counting: 3,
    listing: 3,
    words: 8,
    writing: 5,
    beyond: 13,
}


def draw(rng: random.Random) -> Exchange:
    topic = rng.choices(list(TOPICS), weights=list(TOPICS.values()))[0]
    return topic(rng)
