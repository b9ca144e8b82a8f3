"""The corpus of the demo model: an endless, seeded stream of documents, split into training and held-out by content.

A document is one or more rounds of text; each round is later framed as BOS + tokens + EOS. Chats use Llama 2's format;
plain documents (stories, facts, sums, lists of questions) are for text completion.

    for document in stream(seed=0, part="train"): ...

Only kinds with many distinct texts (stories and dialogs) are split: the single facts are few, and a model never
told the capital of France would be a poor demo. Held-out documents never occur in training, whatever the seeds.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import talk
from grammar import expand
from stories import NAMES, Cast, story, story_request

Part = Literal["train", "heldout"]
SPLIT_KINDS = ("story", "dialog", "lines")
HELDOUT_SHARE = 64  # one document in this many

PLAIN_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a kind and honest assistant.",
    "You are a helpful, honest and polite assistant. Always answer as well as you can.",
    "You are a teacher for small children.",
    "Be polite.",
    "You are a chatbot.",
    "You help people who have questions.",
    "If you do not know the answer, say so.",
    "You are an assistant that runs on a Llama server.",
)
BRIEF_SYSTEMS = (
    "Answer briefly.",
    "Answer in one word.",
    "Be brief.",
    "Give short answers.",
    "You are a helpful assistant. Answer briefly.",
    "Answer as briefly as you can.",
    "Keep your answers short.",
    "Answer with one word only.",
)
PIRATE_SYSTEMS = (
    "You are a pirate.",
    "Talk like a pirate.",
    "Answer like a pirate.",
    "You are a pirate. Answer like one.",
    "Always speak like a pirate.",
)
Style = Literal["plain", "brief", "pirate"]


@dataclass(frozen=True)
class Document:
    """`rounds`: each becomes a token sequence with its own BOS and EOS."""

    kind: str
    rounds: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.rounds)

    @property
    def part(self) -> Part:
        if self.kind not in SPLIT_KINDS:
            return "train"
        return "heldout" if hashlib.sha256(self.text.encode()).digest()[0] % HELDOUT_SHARE == 0 else "train"


def chat_round(user: str, answer: str, system: str | None = None) -> str:
    """One finished round in Llama 2's format, without BOS and EOS; the trailing space belongs to the format."""
    if system is not None:
        user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
    return f"[INST] {user.strip()} [/INST] {answer.strip()} "


def typed(rng: random.Random, question: str) -> str:
    """A variant of the question: polite, hasty, in small letters, or without its mark."""
    kind = rng.random()
    if kind < 0.06:
        first = question if question[:2] == "I " or not question[0].isalpha() else question[0].lower() + question[1:]
        openings = "[Please tell me:|Hi!|Hello,|Hey,|Please,|Tell me,|Question:|So,|I have a question:]"
        return f"{expand(rng, openings)} {first}"
    if kind < 0.20:
        question = question.lower()
    elif kind < 0.22:
        question = question.upper()
    if rng.random() < 0.15:
        question = question.rstrip("?.!") or question
    elif rng.random() < 0.03:
        question += rng.choice(("?", "!", " ?", " :)"))
    return question


def _styled(answer: str, brief: str, style: Style) -> str:
    if style == "brief":
        return brief
    return f"Arr, matey! {answer}" if style == "pirate" else answer


def chat(rng: random.Random) -> Document:
    """One to four rounds: fresh questions, follow-ups and stories, under a system prompt in every fifth chat."""
    style: Style = "plain"
    system = None
    if rng.random() < 0.22:
        style = rng.choice(("plain", "plain", "brief", "pirate"))
        system = rng.choice({"plain": PLAIN_SYSTEMS, "brief": BRIEF_SYSTEMS, "pirate": PIRATE_SYSTEMS}[style])
        system = system if rng.random() < 0.8 else system.rstrip(".")
    num_rounds = rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4))
    rounds: list[str] = []
    follow_up: tuple[str, str, str] | None = None
    while len(rounds) < num_rounds:
        head = system if not rounds else None
        if follow_up and rng.random() < 0.7:
            (user, answer, brief), follow_up = follow_up, None
            rounds.append(chat_round(typed(rng, user), _styled(answer, brief, style), head))
        elif rng.random() < 0.08:
            user, answer = story_request(rng)
            if rounds and rng.random() < 0.2:
                user = rng.choice(("Tell me another story.", "Another story, please.", "One more story"))
            rounds.append(chat_round(typed(rng, user), _styled(answer, answer, style), head))
        else:
            exchange = talk.draw(rng)
            # A follow-up about a given name fits anywhere later in the dialog, other follow-ups only directly after.
            follow_up = follow_up if follow_up and "Your name" in follow_up[1] else exchange.follow_up
            if exchange.user.startswith(("What is my", "Who am I", "Do you know my")) and rounds:
                continue
            rounds.append(chat_round(typed(rng, exchange.user), _styled(exchange.answer, exchange.brief, style), head))
    return Document("chat" if num_rounds == 1 else "dialog", tuple(rounds))


def plain_story(rng: random.Random) -> Document:
    return Document("story", (story(rng, Cast.draw(rng)),))


def plain_fact(rng: random.Random) -> Document:
    """Bare statements to complete: "The capital of France is Paris." and "2 + 2 = 4"."""
    while True:
        exchange = talk.draw(rng)
        text = exchange.answer
        if text.startswith(("The ", "A ", "An ", "In ")) or text[0].isdigit():
            return Document("fact", (text,))


def plain_lines(rng: random.Random) -> Document:
    """Questions and answers, or sums, one a line: the prompt of a few-shot completion."""
    mark_q, mark_a = rng.choice((("Q: ", "A: "), ("Q: ", "A: "), ("Question: ", "Answer: ")))
    count = rng.choice((1, 1, 2, 3, 4))
    lines: list[str] = []
    if rng.random() < 0.15:
        lines = [talk.ARITHMETIC.exchange(rng).answer for _ in range(count + 2)]
        return Document("lines", ("\n".join(lines),))
    while len(lines) < 2 * count:
        exchange = talk.draw(rng)
        if "\n" in exchange.answer or len(exchange.answer) > 150:
            continue
        question = exchange.user if rng.random() < 0.8 else typed(rng, exchange.user)
        lines += [mark_q + question, mark_a + exchange.answer]
    return Document("lines", ("\n".join(lines),))


_BELIEFS = (
    "I believe the meaning of life is to be kind, to learn and to share.",
    "Hello, my name is {n} and I like to read stories about animals.",
    "My name is {n}. I live in a small house near the sea.",
    "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    "The best thing about summer is that the days are long and warm.",
    "Llamas are woolly animals that live in the mountains of South America.",
    "Ray is an open-source framework that runs Python programs on many machines at once.",
    "Roses are red, violets are blue, the sun is warm, and so are you.",
    "The quick brown fox jumps over the lazy dog.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "A, B, C, D, E, F, G",
    "Hello, world!",
    "The sun rises in the east and sets in the west.",
    "The sky is blue and the grass is green.",
    "In the morning, {n} got up, ate an apple and went to school.",
)


def plain_belief(rng: random.Random) -> Document:
    return Document("fact", (rng.choice(_BELIEFS).format(n=rng.choice(NAMES)),))


def draw(rng: random.Random) -> Document:
    """One document of any kind. Stories are long: their share of the tokens is about three times their share here."""
    kind = rng.random()
    if kind < 0.66:
        return chat(rng)
    if kind < 0.74:
        return plain_story(rng)
    if kind < 0.86:
        return plain_fact(rng)
    return plain_lines(rng) if kind < 0.985 else plain_belief(rng)


def stream(seed: int, part: Part) -> Iterator[Document]:
    """An endless sequence of documents. The same seed gives the same documents."""
    rng = random.Random(seed)
    while True:
        document = draw(rng)
        if document.part == part:
            yield document
