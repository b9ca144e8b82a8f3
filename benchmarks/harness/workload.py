"""The requests of a load: prompts as token ids, and the number of tokens to generate for each.

A seed gives the same load in every environment, so this module uses the standard library only. Ids are uniformly random,
chosen from all but the first three, which are control pieces in Llama's vocabularies.
"""

import random
from dataclasses import dataclass

FIRST_ORDINARY_ID = 3  # after <unk>, <s> and </s>
# 32 requests of these lengths make 4,160 prompt tokens and 2,304 output tokens, long and short ones mixed.
PROMPT_LENGTHS = (16, 48, 80, 112, 144, 176, 208, 256)
OUTPUT_LENGTHS = (16, 32, 48, 64, 80, 96, 112, 128)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the exact number of tokens to generate, EOS ignored."""

    prompt: list[int]
    num_output: int


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Random ids: in no prefix cache, and repeated only by chance."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(length)]


def uniform_batch(count: int, num_prompt: int, num_output: int, vocab_size: int, seed: int = 1) -> list[Request]:
    """`count` requests of one length with different prompts."""
    return [Request(random_prompt(num_prompt, vocab_size, 1000 * seed + i), num_output) for i in range(count)]


def mixed_batch(count: int, vocab_size: int, seed: int = 7) -> list[Request]:
    """The offline load, with the lengths above. Every eight requests have each prompt and each output length once; the output
    lengths shift by one every eight requests, so that a prompt length meets different output lengths."""
    return [
        Request(random_prompt(PROMPT_LENGTHS[i % 8], vocab_size, 1000 * seed + i), OUTPUT_LENGTHS[(3 * i + i // 8) % 8])
        for i in range(count)
    ]


def long_batch(count: int, shortest: int, longest: int, vocab_size: int, seed: int = 7) -> list[Request]:
    """Uniform random lengths of prompt and output from shortest .. longest, independently."""
    draw = random.Random(seed)
    lengths = [(draw.randint(shortest, longest), draw.randint(shortest, longest)) for _ in range(count)]
    return [
        Request(random_prompt(num_prompt, vocab_size, 1000 * seed + i), num_output)
        for i, (num_prompt, num_output) in enumerate(lengths)
    ]


def shared_prefix_batch(
    count: int, num_shared: int, num_own: int, num_output: int, vocab_size: int, seed: int = 11
) -> list[Request]:
    """Requests that begin with the same `num_shared` tokens, like those with one system prompt."""
    shared = random_prompt(num_shared, vocab_size, seed)
    own = uniform_batch(count, num_own, num_output, vocab_size, seed + 1)
    return [Request(shared + request.prompt, num_output) for request in own]


def repetitive_prompt(length: int, vocab_size: int, seed: int, period: int = 24) -> list[int]:
    """A prompt that repeats the same `period` tokens, like code, tables and quoted text."""
    piece = random_prompt(period, vocab_size, seed)
    return (piece * (length // period + 1))[:length]
