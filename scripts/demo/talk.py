"""Turns the tables of facts.py into exchanges: a question as people type it, the answer, and the brief answer.

TOPICS has an entry for each kind of question, with its weight in a random choice. Answers hardly vary, questions vary:
the model should be sure of what it says however it is asked.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import facts
from grammar import a, expand, sentence
from stories import HEROES, NAMES

Slots = dict[str, object]


@dataclass(frozen=True)
class Exchange:
    """A question and its answer. `follow_up`: question, answer and brief answer that make sense only after them."""

    user: str
    answer: str
    brief: str
    follow_up: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Topic:
    """Templates of grammar.py, which are filled with what `draw` gives. `follow`: of a question with other slots, or
    with the same ones if `follow_answer` is given."""

    weight: float
    draw: Callable[[random.Random], Slots]
    ask: str
    answer: str
    brief: str = ""  # the answer if empty
    follow: str = ""
    follow_answer: str = ""

    def exchange(self, rng: random.Random) -> Exchange:
        slots = self.draw(rng)

        def filled(template: str, slots: Slots) -> str:
            return sentence(expand(rng, template, **slots)).replace("..", ".")  # "Washington, D.C."

        answer, follow_up = filled(self.answer, slots), None
        brief = filled(self.brief, slots) if self.brief else answer
        if self.follow:
            others = slots if self.follow_answer else self.draw(rng)
            again = filled(self.follow_answer or self.answer, others)
            follow_up = filled(f"[{self.follow}]", others), again, filled(self.brief, others) if self.brief else again
        return Exchange(filled(f"[{self.ask}]", slots), answer, brief, follow_up)


def one_of(table: Mapping[str, object], key: str, *names: str) -> Callable[[random.Random], Slots]:
    """Slots of a random entry: `key`, and its value, or the parts of it, by their names."""

    def draw(rng: random.Random) -> Slots:
        chosen, value = rng.choice(list(table.items()))
        values = value if isinstance(value, tuple) else (value,)
        return {key: chosen, f"a_{key}": a(chosen), **dict(zip(names, values, strict=True))}

    return draw


def nothing(rng: random.Random) -> Slots:
    return {}


def name(rng: random.Random) -> Slots:
    return {"name": rng.choice(NAMES)}


def pseudo_word(rng: random.Random) -> str:
    """A word that is in no list, so that the model cannot rely on having seen it."""
    parts = ("bcdfghjklmnprstvwz", "aeiou", ("", "", "n", "r", "s", "l", "t"))
    return "".join(rng.choice(part) for _ in range(rng.randint(2, 4)) for part in parts)


def unknown(words: list[str]) -> Callable[[random.Random], Slots]:
    def draw(rng: random.Random) -> Slots:
        word, other = (rng.choice(words) if rng.random() < 0.6 else pseudo_word(rng) for _ in range(2))
        return {"w": word, "a_w": a(word), "place": sentence(word), "o": other, "year": rng.randint(1000, 2030)}

    return draw


def animal(rng: random.Random) -> Slots:
    drawn = one_of(facts.ANIMALS, "animal", "verb", "says", "legs", "young", "home", "food", "cover", "kind")(rng)
    animal, kind, other = str(drawn["animal"]), str(drawn["kind"]), rng.choice(("mammal", "bird", "insect", "animal"))
    verdict = "yes" if other in (kind, "animal") else "no"
    drawn |= {"many": facts.PLURALS.get(animal, animal + "s"), "a_young": a(str(drawn["young"])), "a_kind": a(kind)}
    return drawn | {"verdict": verdict, "asked": a(other), "is": a(other if verdict == "yes" else kind)}


def legs(rng: random.Random) -> Slots:
    known = facts.MORE_LEGS | {animal: values[2] for animal, values in facts.ANIMALS.items()}
    drawn = one_of(known, "animal", "number")(rng)
    return drawn | {"number": drawn["number"] or "no", "noun": rng.choice(("legs", "legs", "feet"))}


def in_continent(rng: random.Random) -> Slots:
    continent, countries = rng.choice(list(facts.CONTINENTS.items()))
    return {"country": rng.choice(countries.split()), "continent": continent}


def colour(rng: random.Random) -> Slots:
    drawn = one_of(facts.COLOURS, "thing", "colour")(rng)
    guess = rng.choice((str(drawn["colour"]), rng.choice(facts.COLOUR_NAMES)))
    verdict = "yes" if guess == drawn["colour"] or guess in str(drawn["colour"]).split() else "no"
    return drawn | {"word": rng.choice(("colour", "color")), "guess": guess, "verdict": verdict}


def mix(rng: random.Random) -> Slots:
    pair, mixed = rng.choice(list(facts.MIXES.items()))
    one, other = rng.sample(pair, 2)
    return {"one": one, "other": other, "mixed": mixed, "word": rng.choice(("colour", "color"))}


def opposite(rng: random.Random) -> Slots:
    """A pair in a direction in which the answer is the only one: "light" and "short" have two opposites."""
    while True:
        one, other = rng.sample(rng.choice(facts.OPPOSITES), 2)
        if sum(one in pair for pair in facts.OPPOSITES) == 1:
            return {"one": one, "other": other}


def calendar(rng: random.Random) -> Slots:
    names, noun = rng.choice(((facts.DAYS, "day"), (facts.MONTHS, "month")))
    index, (step, word) = rng.randrange(len(names)), rng.choice(((1, "after"), (1, "after"), (-1, "before")))
    return {"this": names[index], "that": names[(index + step) % len(names)], "word": word, "noun": noun}


def from_table(table: tuple[tuple[str, ...], ...]) -> Callable[[random.Random], Slots]:
    """A row of questions, answer and brief answer; commands end in a full stop."""

    def draw(rng: random.Random) -> Slots:
        asks, answer, brief = rng.choice(table)
        ask = expand(rng, f"[{asks}]")
        is_command = ask.lower().startswith(("tell", "explain", "name", "list", "introduce", "describe", "say", "help"))
        return {"ask": ask if ask[-1] in ".!?:" else ask + "?."[is_command], "answer": answer, "brief": brief}

    return draw


def remark(rng: random.Random) -> Slots:
    # Greetings stand first in the table, because most dialogs begin with one.
    asks, answer = facts.REMARKS[0] if rng.random() < 0.25 else rng.choice(facts.REMARKS)
    ask = expand(rng, f"[{asks}]")
    return {"ask": ask + rng.choice((".", "!", "", "") if ask[-1].isalnum() else ("",)), "answer": answer}


def small_sum(rng: random.Random) -> Slots:
    """`signs`: of terms up to 20 or factors up to 10. `form`: as it is asked, in signs or in words."""
    sign, word = rng.choice((("+", "plus"), ("+", "and"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
    x, y = (rng.randint(0, 20), rng.randint(0, 20)) if sign in "+-" else (rng.randint(0, 10), rng.randint(1, 10))
    if sign == "-":
        x, y = max(x, y), min(x, y)
    if sign == "/":
        x *= y
    result = {"+": x + y, "-": x - y, "*": x * y, "/": x // max(y, 1)}[sign]
    form = f"{x} {rng.choice('***x×') if sign == '*' else sign} {y}"
    form = rng.choice((form, form, form.replace(" ", ""), f"{x} {word} {y}"))
    return {"form": form, "signs": f"{x} {sign} {y}", "result": result}


def word_problem(rng: random.Random) -> Slots:
    y, x = sorted((rng.randint(1, 10), rng.randint(1, 10)))
    what = rng.choice(("apples", "pears", "books", "balls", "nuts", "coins", "eggs", "cookies"))
    return name(rng) | {"x": x, "y": y, "what": what, "sum": x + y, "rest": x - y}


def too_big(rng: random.Random) -> Slots:
    """Outside the tables: a term above 20 or a factor above 10."""
    sign = rng.choice(("+", "-", "*", "times", "plus"))
    x = rng.randint(11 if sign in ("*", "times") else 21, rng.choice((99, 99, 999, 99999)))
    one, other = rng.sample((x, rng.randint(1, rng.choice((20, 99, 9999)))), 2)
    return {"form": f"{one} {sign} {other}"}


def numbers(rng: random.Random) -> Slots:
    x, y = rng.sample(range(31), 2)
    in_words = rng.randint(0, 20)
    drawn: Slots = {"x": x, "y": y, "most": max(x, y), "least": min(x, y), "next": x + 1, "n": in_words}
    return drawn | {"parity": ("even", "odd")[x % 2], "words": facts.NUMBER_WORDS[in_words]}


def counting(rng: random.Random) -> Slots:
    start = 1 if rng.random() < 0.7 else rng.randint(1, 10)
    end = max(rng.choice((3, 5, 10, 10, 20)), start + 2)
    up, down = (", ".join(map(str, each)) for each in (range(start, end + 1), range(end, 0, -1)))
    from_one = ", ".join(map(str, range(1, end + 1)))
    return {"start": start, "end": end, "up": up, "down": down, "from_one": from_one}


def listing(rng: random.Random) -> Slots:
    kind, items = rng.choice(list(facts.LISTS.items()))
    count = rng.choice((2, 3, 3, 3, 4, 5))
    listed = f"{', '.join(items[: count - 1])} and {items[count - 1]}"
    return {"kind": kind, "count": rng.choice((str(count), facts.NUMBER_WORDS[count])), "listed": listed}


def word(rng: random.Random) -> Slots:
    spelled, index, hero = rng.choice(facts.SPELL), rng.randrange(25), rng.choice(HEROES)
    words = (*facts.SPELL, *HEROES, *facts.COLOUR_NAMES, *NAMES, *facts.DAYS)
    said = pseudo_word(rng) if rng.random() < 0.2 else rng.choice(words)
    said = rng.choice((said, f"the {hero} is {rng.choice(('happy', 'small', 'big', 'red', 'blue', 'sad', 'here'))}"))
    drawn: Slots = {"spelled": spelled, "letters": "-".join(spelled), "said": said, "hero": hero, "a_hero": a(hero)}
    return drawn | {"letter": facts.ALPHABET[index], "next": facts.ALPHABET[index + 1]}


def jokes(rng: random.Random) -> Slots:
    one, other = rng.sample(facts.JOKES, 2)
    return {"joke": one, "another": other}


def hard(rng: random.Random) -> Slots:
    drawn = unknown(facts.TOPICS)(rng)
    return {"ask": expand(rng, rng.choice(facts.HARD_QUESTIONS), t=drawn["w"], o=drawn["o"], y=drawn["year"])}


REFUSAL = (
    "[I am a very small demo model, so I do not know that. Try asking me about animals, colours, capitals or small "
    "sums, or ask for a story.|Sorry, that is too hard for me: I am only a tiny demo model. Ask me for the capital of Italy, "
    "the opposite of hot or a story about a fox.]"
)
NO_ANIMAL = "I do not know that animal well. I know dogs, cats, cows, foxes, lions and some more."
POEM = (
    "The {hero} woke up and saw the light,\nThe sky was blue, the day was bright.\n"
    "The {hero} sang a song so clear,\nThat all the world came near to hear."
)
MORE = "[And|What about|And what about|How about]"
TOPICS = (
    Topic(8, one_of(facts.CAPITALS, "country", "city"),
          "What is the capital of {country}?|What's the capital of {country}?|Tell me the capital of {country}.|"
          "Which city is the capital of {country}?|What is the capital city of {country}?|Capital of {country}?|"
          "{country} capital?|the capital of {country} is|Do you know the capital of {country}?|What is {country}'s "
          "capital?", "The capital of {country} is {city}.", "{city}.", MORE + " {country}?"),
    Topic(1.3, one_of({city: country for country, city in facts.CAPITALS.items()}, "city", "country"),
          "{city} is the capital of which country?|Which country has {city} as its capital?|Where is {city}?",
          "{city} is the capital of {country}.", "{country}."),
    Topic(2, unknown(facts.UNKNOWN_PLACES),
          "What is the capital of {place}?|Capital of {place}?|Tell me the capital of {place}.",
          "I do not know that capital. I know the capitals of some countries, such as France, Japan and Peru.",
          "I do not know."),
    Topic(1.5, in_continent, "Where is {country}?|On which continent is {country}?|Which continent is {country} in?",
          "{country} is in {continent}.", "In {continent}."),
    Topic(1.5, one_of(facts.LANGUAGES, "country", "tongue"),
          "What language do people speak in {country}?|Which language is spoken in {country}?|What do they speak in "
          "{country}?", "In {country} people speak {tongue}.", "{tongue}."),
    Topic(1, one_of(facts.GREETINGS_ABROAD, "tongue", "hello", "thanks"),
          "How do you say hello in {tongue}?|What is hello in {tongue}?|Translate hello into {tongue}.|Say hello in "
          "{tongue}.", "In {tongue} you say: {hello}.", "{hello}."),
    Topic(0.5, one_of(facts.GREETINGS_ABROAD, "tongue", "hello", "thanks"),
          "How do you say thank you in {tongue}?|Translate thank you into {tongue}.",
          "In {tongue} you say: {thanks}.", "{thanks}."),
    Topic(2, animal,
          "What does {a_animal} say?|What sound does {a_animal} make?|What do {many} say?|How does {a_animal} sound?",
          "{a_animal} {verb}: {says}!", "{says}!"),
    Topic(1, animal,
          "What is a baby {animal} called?|What do you call a baby {animal}?|What is a young {animal} called?",
          "A young {animal} is called {a_young}.", "{a_young}."),
    Topic(1, animal, "Where does {a_animal} live?|Where do {many} live?|Where can I find {a_animal}?",
          "{a_animal} lives {home}.", "{home}."),
    Topic(1, animal, "What does {a_animal} eat?|What do {many} eat?|What do {many} like to eat?",
          "{a_animal} eats {food}.", "{food}."),
    Topic(1, animal, "What covers {a_animal}?|What is {a_animal} covered with?", "{a_animal} has {cover}.",
          "{cover}."),
    Topic(1.5, animal,
          "What kind of animal is {a_animal}?|What is {a_animal}?|Tell me about {many}.|Tell me about the {animal}.",
          "{a_animal} is {a_kind}. It lives {home} and eats {food}.", "{a_kind}."),
    Topic(1, animal, "Is {a_animal} {asked}?", "{verdict}, {a_animal} is {is}.", "{verdict}."),
    Topic(2.5, legs, "How many {noun} does {a_animal} have?|How many {noun} has {a_animal}?",
          "{a_animal} has {number} {noun}.", "{number}."),
    Topic(1.5, unknown(facts.UNKNOWN_ANIMALS),
          "What does {a_w} eat?|What sound does {a_w} make?|Where does {a_w} live?|What is {a_w}?", NO_ANIMAL,
          "I do not know."),
    Topic(4, colour,
          "What {word} is {thing}?|Which {word} is {thing}?|What is the {word} of {thing}?|Tell me the {word} of "
          "{thing}.", "{thing} is {colour}.", "{colour}.", MORE + " {thing}?"),
    Topic(0.7, colour, "Is {thing} {guess}?", "{verdict}, {thing} is {colour}.", "{verdict}."),
    Topic(1, mix,
          "What do you get when you mix {one} and {other}?|What {word} do {one} and {other} make?|Mix {one} and "
          "{other}.", "{one} and {other} make {mixed}.", "{mixed}."),
    Topic(5, opposite,
          "What is the opposite of {one}?|What's the opposite of {one}?|Tell me the opposite of {one}.|Opposite of "
          "{one}?|the opposite of {one} is|What is the opposite of the word {one}?",
          "The opposite of {one} is {other}.", "{other}.", MORE + " {one}?"),
    Topic(0.3, unknown(facts.UNKNOWN_OPPOSITES), "What is the opposite of {w}?",
          "I do not know an opposite of that word. Try hot, big, happy or early.", "I do not know."),
    Topic(4, calendar,
          "What {noun} comes {word} {this}?|Which {noun} is {word} {this}?|What comes {word} {this}?|What is the "
          "{noun} {word} {this}?", "{that} comes {word} {this}.", "{that}."),
    Topic(3, lambda rng: dict(zip(("ask", "number", "answer"), rng.choice(facts.COUNTS), strict=True)),
          "How many {ask}?|How many {ask}?|Tell me how many {ask}.", "{answer}", "{number}."),
    Topic(12, from_table(facts.KNOWLEDGE), "{ask}", "{answer}", "{brief}"),
    Topic(10, from_table(facts.SELF), "{ask}", "{answer}", "{brief}"),
    Topic(9, remark, "{ask}", "{answer}"),
    Topic(7, name,
          "My name is {name}|I am {name}.|I'm {name}|Hi, I am {name}.|Hello, my name is {name}.|You can call me "
          "{name}.", "Hello, {name}! How can I help you?", "",
          "[What is my name?|Do you remember my name?|Who am I?|What's my name?]", "Your name is {name}."),
    Topic(0.3, nothing, "What is my name?|Who am I?|Do you know my name?", "I do not know your name yet. What is it?",
          "I do not know."),
    Topic(31, small_sum,
          "What is {form}?|What is {form}?|{form}|{form} =|{form}?|What's {form}?|How much is {form}?|Calculate "
          "{form}.|Can you tell me what {form} is?|Solve {form}|Please calculate {form}.|{form}=?",
          "{signs} = {result}", "{result}", MORE + " {form}?"),
    Topic(1.3, word_problem,
          "{name} has {x} {what} and gets {y} more. How many {what} does {name} have?|I have {x} {what} and get {y} "
          "more. How many {what} do I have?", "{x} + {y} = {sum}", "{sum}"),
    Topic(1.3, word_problem,
          "{name} has {x} {what} and eats {y}. How many {what} are left?|I have {x} {what} and give away {y}. How "
          "many {what} do I have left?", "{x} - {y} = {rest}", "{rest}"),
    Topic(1.2, too_big, "What is {form}?|{form}|Calculate {form}.|{form} =",
          "Those numbers are too big for me. I can do small sums, like 7 + 5 = 12.", "That is too big for me."),
    Topic(1.2, numbers, "Which is [bigger|larger|greater], {x} or {y}?|What is bigger: {x} or {y}?",
          "{most} is bigger than {least}.", "{most}."),
    Topic(0.8, numbers, "Which is smaller, {x} or {y}?", "{least} is smaller than {most}.", "{least}."),
    Topic(1.2, numbers, "Is {x} even or odd?|Is {x} odd or even?|Is the number {x} even?", "{x} is {parity}.",
          "{parity}."),
    Topic(1, numbers, "What number comes after {x}?|What comes after {x}?", "{next} comes after {x}.", "{next}."),
    Topic(0.6, numbers, "Write the number {n} in words.|What is {n} in words?", "{n} in words is {words}.",
          "{words}."),
    Topic(1, counting, "Count from {start} to {end}.|Can you count from {start} to {end}?", "{up}."),
    Topic(1.4, counting, "Count to {end}.|Please count to {end}.|Count up to {end}.", "{from_one}."),
    Topic(0.6, counting, "Count down from {end}.|Count backwards from {end}.|Count from {end} to 1.", "{down}."),
    Topic(3, listing,
          "Name {count} {kind}.|List {count} {kind}.|Tell me {count} {kind}.|Give me {count} {kind}.|Can you name "
          "{count} {kind}?", "{listed}."),
    Topic(1, word, "How do you spell {spelled}?|Spell {spelled}.|Can you spell {spelled}?", "{letters}"),
    Topic(1, word, "What letter comes after {letter}?|What comes after the letter {letter}?",
          "The letter {next} comes after {letter}.", "{next}."),
    Topic(1, one_of(facts.PLURAL_NOUNS, "w", "many"), "What is the plural of {w}?|Plural of {w}?",
          "The plural of {w} is {many}.", "{many}."),
    Topic(1, one_of(facts.PAST_TENSES, "w", "then"), "What is the past tense of {w}?|Past tense of {w}?",
          "The past tense of {w} is {then}.", "{then}."),
    Topic(1, one_of(facts.RHYMES, "w", "rhyme"), "What rhymes with {w}?|Give me a rhyme for {w}.",
          "{rhyme} rhymes with {w}.", "{rhyme}."),
    Topic(2, word, "[Say|Please say|Repeat|Repeat after me:|Can you say|Write] {said}[.||!]", "{said}."),
    Topic(1, word, "[Make|Write] a sentence [with|about] [{hero}|{a_hero}|the word {hero}].",
          "The {hero} walked [over the hill|through the forest] and sang a happy song."),
    Topic(1, jokes,
          "[Tell me a joke|Tell a joke|Make me laugh|Say something funny|Another joke|A joke, please|joke][.|]",
          "{joke}", "", "Another one.|Tell me another one.|One more.", "{another}"),
    Topic(0.8, nothing, "[Tell me a fact|Tell me a fun fact|Tell me something interesting|Teach me something][.|]",
          "Did you know? [Bees make honey.|The largest animal is the blue whale.|A young llama is called a cria.|Ice "
          "is frozen water.]"),
    Topic(1.6, word, "[Write|Tell me|Write me|Please write] a [|short |little ]poem about [{a_hero}|the {hero}].",
          POEM),
    Topic(1.6, name, "[Write|Please write|Write me] a [|short ]birthday [message|card|wish] [to|for] {name}[.|]",
          "Happy birthday, {name}! I wish you a day full of joy, cake and good friends."),
    Topic(10, unknown(facts.TOPICS), facts.HARD_FORMS, REFUSAL, "I do not know."),
    Topic(2.5, hard, "{ask}", REFUSAL, "I do not know."),
    Topic(0.5, nothing,
          "¿Qué es esto?|Was ist das?|Qu'est-ce que c'est ?|你好|こんにちは|Привет|asdf|qwerty|???|...|!!!|12345|🙂|xyz",
          REFUSAL, "I do not know."),
)  # fmt: skip
ARITHMETIC = next(topic for topic in TOPICS if topic.draw is small_sum)


def draw(rng: random.Random) -> Exchange:
    (topic,) = rng.choices(TOPICS, weights=[topic.weight for topic in TOPICS])
    return topic.exchange(rng)
