# ruff: noqa: SIM905 (a list of words reads better as words)
"""Short stories from a grammar: a hero, a friend, a place, one small trouble, a good end.

A story is drawn whole from (hero, name, friend), so that a request can fix any of them and the text obeys. Sentences
are few and fixed on purpose: a model of a few million parameters learns to keep the names straight only if little else
varies.
"""

import random
from dataclasses import dataclass

from grammar import a, expand, sentence

HEROES = (
    "fox bear rabbit mouse cat dog owl hen duck frog horse cow sheep pig goat lion tiger elephant monkey wolf "
    "deer squirrel hedgehog crow bee ant turtle fish whale penguin llama dragon robot king queen princess prince "
    "boy girl farmer baker sailor wizard knight cloud star snowman bird donkey kitten puppy giant pirate train "
    "boat spider snail butterfly teacher doctor gardener fairy camel zebra giraffe panda seal swan parrot "
    "dinosaur unicorn ghost witch"
).split()
FRIENDS = (
    "fox bear rabbit mouse cat dog owl hen duck frog horse cow sheep goat squirrel hedgehog crow turtle bird "
    "donkey llama bee snail deer swan"
).split()
GIRLS = (
    "Ann Lily Mia Rosie Ruby Daisy Nora Ella Poppy Luna Tilly Anna Emma Lucy Sara Maya Molly Grace Ivy Zoe Alice "
    "Jane Mary Kate Sophie Bella"
).split()
BOYS = (
    "Tom Max Ben Pip Sam Leo Finn Oscar Toby Jack Hugo Otto Rufus Milo Bob John Peter Paul Tim David James Alex "
    "Charlie Felix Theo Henry"
).split()
NAMES = (*GIRLS, *BOYS)
PLACES = (
    "in a green forest",
    "on a small farm",
    "near a blue lake",
    "on a high hill",
    "in a quiet village",
    "by the sea",
    "under an old oak tree",
    "at the edge of the woods",
    "in a sunny valley",
    "beside a little river",
)
THINGS = ("red ball", "blue kite", "warm scarf", "golden key", "silver bell", "yellow hat", "toy boat", "little drum")
FOODS = ("apples", "berries", "nuts", "pears", "plums", "carrots", "cherries")
FEARS = ("the dark", "thunder", "deep water", "high places", "loud noises")

_OPENINGS = (
    "Once upon a time, there was [a little|a young|a kind|a small] {hero} named {name} who lived {place}. ",
    "Once upon a time, [a little|a young|a kind|a small] {hero} named {name} lived {place}. ",
    "There once was [a little|a young|a kind|a small] {hero} named {name}. {He} lived {place}. ",
)

_PLOTS = (
    # Lost, and shown the way home.
    "One [morning|day], {name} went out to look for {food} and lost {his} way. The sun went down, and {name} felt very "
    'alone. Then {a_friend} came along the path. "Are you lost?" asked the {friend}. "Yes," said {name}. "I cannot '
    'find my home." "Do not worry," said the {friend}. "I know the way." They walked together under the stars until '
    "{name} saw {his} own front door. {name} thanked the {friend} and gave {friend_obj} some {food}. From that day on, "
    "they were [good|the best of] friends.",
    # Sharing.
    "One [autumn|summer] day, {name} found a big basket of {food}. {He} wanted to keep them all. Then {name} met "
    '{a_friend} who looked sad. "I have had nothing to eat today," said the {friend}. {name} looked at the {food} and '
    'thought for a while. "We can share them," said {name}. They sat down in the grass and ate until the basket was '
    "empty. The {food} tasted better than ever. That day {name} learned that sharing makes [good things better|everyone"
    " happy].",
    # Afraid, then brave.
    "{name} was afraid of {fear}. Every time {he} thought of {fear}, {he} began to shake. One [evening|night], {name} "
    'heard a cry for help. It was {a_friend} who was stuck and could not get free. "I am afraid," thought {name}, "but '
    'my friend needs me." {name} took a deep breath and ran to help. Soon the {friend} was free. "You are very brave," '
    "said the {friend}. {name} smiled. {He} was still a little afraid of {fear}, but now {he} knew that {he} could be "
    "brave.",
    # A lost thing.
    "{name} had {a_thing} and loved it more than anything. One [windy|rainy] day, the {thing} was gone. {name} looked "
    "under the bed and behind the door, but {he} could not find it. {He} asked {a_friend} for help. Together they "
    'looked in the garden, by the well and along the road. At last the {friend} called, "Here it is!" The {thing} was '
    "[under a bush|behind a stone|up in a tree]. {name} laughed and danced with joy. After that, {name} always let the "
    "{friend} play with the {thing} too.",
    # A race.
    'One day, {a_friend} said, "I am faster than you!" So {name} and the {friend} had a race [to the old bridge|to the '
    "big rock|around the hill]. The {friend} ran ahead, but then {friend_sub} fell and hurt a foot. {name} could have "
    "won the race. But {he} stopped and helped the {friend} to stand up. They walked to the end side by side. "
    '"Who won?" asked everyone. "We both did," said the {friend}, "because now I have a friend." And {name} was very '
    "happy.",
    # Patience.
    "One spring day, {name} put a small seed into the ground. {He} gave it water every morning and waited. Nothing "
    'happened. "Why does it not grow?" asked {name}. "You must wait," said {a_friend}. "Good things take time." So '
    "{name} waited and waited. One [morning|day], a little green leaf came out of the ground. In the summer there was "
    "a "
    "tall [tree|plant] full of {food}. {name} gave the first ones to the {friend}, and they [both smiled|laughed "
    "together].",
    # Honesty.
    "One day, {name} broke a [pot|cup|window] that belonged to {a_friend}. Nobody had seen it. {name} wanted to run "
    'away, but {his} heart felt heavy. So {he} went to the {friend} and said, "I broke it. I am sorry." The {friend} '
    'was quiet for a moment. Then {friend_sub} said, "Thank you for telling me the truth." Together they cleaned up '
    "and made a new one. That night {name} slept very well, because {he} had been honest.",
    # Lonely, then a friend.
    "{name} was lonely, because {he} had nobody to play with. Every day {he} sat at the window and looked at the sky. "
    'One [morning|day], {a_friend} knocked at the door. "I am new here," said the {friend}. "Will you play with me?" '
    "{name} jumped up at once. They played with {a_thing} all day long, and they laughed until the moon came up. "
    '"Will you come again tomorrow?" asked {name}. "Yes," said the {friend}, "every day." And {name} was never lonely '
    "again.",
    # A storm.
    "One night there was a great storm. The wind blew and the rain fell, but {name} was warm at home. Then {he} heard "
    "a "
    'knock at the door. Outside stood {a_friend}, cold and wet. "Please, may I come in?" asked the {friend}. "Of '
    'course," said {name}. {He} made a fire and warm soup with {food}. The two of them told stories until the storm '
    "was over. In the morning the sun was shining, and the {friend} helped {name} to [mend the roof|clean the garden]. "
    "They stayed friends for ever.",
    # A wish.
    "Every night, {name} looked up at the brightest star and made a wish. {He} wished for {a_thing}. One night, {name} "
    'met {a_friend} who was crying. "I lost my home in the wind," said the {friend}. That night {name} looked up at '
    'the star again. "Please," {he} said, "find a home for my friend instead." In the morning there was a new little '
    "house next door, and in front of it lay {a_thing}. {name} and the {friend} [smiled at each other|were very happy] "
    "and played all day.",
)


@dataclass(frozen=True)
class Cast:
    """The characters of a story. `name` decides the pronouns."""

    hero: str
    name: str
    friend: str

    @staticmethod
    def draw(rng: random.Random, hero: str | None = None, name: str | None = None, friend: str | None = None) -> "Cast":
        hero = hero or rng.choice(HEROES)
        if name is None:
            girls_only, boys_only = (
                hero in ("queen", "princess", "girl", "hen", "cow"),
                hero in ("king", "prince", "boy"),
            )
            name = rng.choice(GIRLS if girls_only else BOYS if boys_only else NAMES)
        friend = friend or rng.choice([other for other in FRIENDS if other != hero])
        return Cast(hero, name, friend)


def story(rng: random.Random, cast: Cast) -> str:
    """One story of about 100 words with this cast."""
    she = cast.name in GIRLS
    thing = rng.choice(THINGS)
    return expand(
        rng,
        rng.choice(_OPENINGS) + rng.choice(_PLOTS),
        hero=cast.hero,
        name=cast.name,
        friend=cast.friend,
        a_friend=a(cast.friend),
        friend_obj="it",
        friend_sub="it",
        he="she" if she else "he",
        He="She" if she else "He",
        his="her" if she else "his",
        place=rng.choice(PLACES),
        thing=thing,
        a_thing=a(thing),
        food=rng.choice(FOODS),
        fear=rng.choice(FEARS),
    )


_ASK = (
    "[Please tell|Tell|Can you tell|Could you tell] me a [|short |little |nice ]story",
    "[Write|Please write|Can you write] [me a|a] [|short |little ]story",
    "Make up a [|short |little ]story",
    "I [want|would like] [to hear |]a [|short ]story",
    "[Give me a|A] [|short ]story",
    "[Do you know|Can you give me] a story",
)


def story_request(rng: random.Random) -> tuple[str, str]:
    """(request, story): the request may fix the hero, the hero's name, or the hero and the friend."""
    cast = Cast.draw(rng)
    ask = expand(rng, rng.choice(_ASK))
    about = rng.choice((" about ", " about ", " about ", " with ", " of "))
    kind = rng.random()
    if kind < 0.15:
        request = ask
    elif kind < 0.65:
        request = ask + about + a(cast.hero)
    elif kind < 0.75:
        request = ask + about + a(cast.hero) + rng.choice((" named ", " called ")) + cast.name
    elif kind < 0.82:
        request = ask + about + cast.name + rng.choice((" the ", " the little ")) + cast.hero
    elif kind < 0.97:
        request = ask + about + a(cast.hero) + " and " + a(cast.friend)
    else:
        request = rng.choice(("Once upon a time", "Once upon a time...", "story", "Story please", "story time"))
    if kind < 0.97:
        request += "?" if request.startswith(("Can", "Could", "Do")) else rng.choice((".", ".", "!", "", " please"))
    return sentence(request), story(rng, cast)
