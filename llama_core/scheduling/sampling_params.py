"""The sampling parameters of one sequence: their types, ranges and defaults. Nothing else checks a range.

The fields marked `PerSlot` are values that a sampler reads on the rank. `backends/sampling_tensors.py` makes a tensor of each,
and `backends/native/logit_rules.hpp` a field of its C struct, so that a new parameter costs one line here, one in the HTTP
schema and its use in each sampler.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, get_args, get_type_hints

from llama_core.errors import InvalidParameter

MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MAX_TEMPERATURE = 1e4  # above it all tokens are equally likely
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 96
MAX_BAD_WORD_TOKENS = 32
MAX_ALLOWED_TOKENS = 4096
MAX_GRAMMAR_BYTES = 3 * 2**16
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

ScalarType = Literal["float32", "int64"]
Pooling = Literal["", "mean", "last", "first"]


@dataclass(frozen=True, slots=True)
class PerSlot:
    """Marks a field of SamplingParams that samplers read: the type in which a rank keeps it, and its range.

    is_open: without `low` itself.
    """

    dtype: ScalarType
    low: float
    high: float
    is_open: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises InvalidParameter."""
        if not (self.low < value if self.is_open else self.low <= value) or value > self.high:
            low, high = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (self.low, self.high))
            words = f"greater than {low} and at most {high}" if self.is_open else f"from {low} to {high}"
            raise InvalidParameter.of(name, f"must be {words}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one sequence.

    temperature: 0 is greedy. top_p: smallest set of most likely tokens whose probability exceeds it, in (0, 1].
    top_k: at most so many tokens, 0 for all. seed: any int64; the sample at a position depends on (seed, position) alone.
    max_tokens: new tokens at most. logprobs: None for none, n for the sampled token's and those of the n most likely.
    prompt_logprobs: the same for the prompt's tokens. ignore_eos: continue past end-of-sequence until max_tokens.

    min_p: no token less likely than this part of the most likely one's probability, after the temperature. presence_penalty,
    frequency_penalty: OpenAI's, of generated tokens. repetition_penalty: transformers', of the prompt's and generated tokens.
    min_tokens: end-of-sequence and stop_token_ids are not sampled before so many tokens, and stop strings that end there are
    text. stop_token_ids: end the generation as end-of-sequence does. include_stop_str_in_output: the output has the stop
    string, or the token, that ended it.
    logit_bias: (token, bias) pairs. bad_words: token sequences that are not generated. allowed_token_ids: nothing else is
    sampled, except to end; () for all tokens. grammar: what the text must follow, in a form that `llguidance.LLMatcher`
    reads; "" for none. Logits change in vLLM's order: allowed tokens and the grammar, bad_words, min_tokens, logit_bias,
    repetition, frequency and presence penalty, temperature, min_p, top_k, top_p.

    pooling: "" generates; else the sequence ends with its prompt, and its embedding is the mean of the prompt's hidden states
    after the final norm, or that of its last or first token.
    """

    temperature: Annotated[float, PerSlot("float32", 0.0, MAX_TEMPERATURE)] = 0.6
    top_p: Annotated[float, PerSlot("float32", 0.0, 1.0, is_open=True)] = 0.9
    top_k: Annotated[int, PerSlot("int64", 0, MAX_TOP_K)] = 0
    seed: Annotated[int, PerSlot("int64", INT64_MIN, INT64_MAX)] = 0
    min_p: Annotated[float, PerSlot("float32", 0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, PerSlot("float32", -2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, PerSlot("float32", -2.0, 2.0)] = 0.0
    repetition_penalty: Annotated[float, PerSlot("float32", 0.0, 10.0, is_open=True)] = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    pooling: Pooling = ""

    def __post_init__(self) -> None:
        """Check types and ranges, and convert to plain numbers: a wrong one would fail every request of a step on the ranks."""
        for name, convert in _CONVERSIONS.items():
            given = getattr(self, name)
            if (plain := convert(name, given)) is not given:
                object.__setattr__(self, name, plain)
        for name, mark in SLOT_FIELDS.items():
            mark.check(name, getattr(self, name))
        if not 0 <= self.max_tokens <= INT64_MAX:
            raise InvalidParameter.of("max_tokens", f"must be from 0 to {INT64_MAX}")
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", whole_number("logprobs", self.logprobs))
            if not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
                raise InvalidParameter.of("logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        if self.min_tokens or self.names_tokens or self.grammar:
            self._check_rules()
        if self.pooling != "":
            self._check_pooling()

    def _check_pooling(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise InvalidParameter.of("pooling", "must be mean, last or first")
        if self.max_tokens or self.prompt_logprobs:
            raise InvalidParameter.of("pooling", "an embedding has neither new tokens nor log-probabilities")

    def _check_rules(self) -> None:
        object.__setattr__(self, "min_tokens", whole_number("min_tokens", self.min_tokens))
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidParameter.of("min_tokens", "must be from 0 to max_tokens")
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        object.__setattr__(
            self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
        )
        words = tuple(_ids("bad_words", word, MAX_BAD_WORD_TOKENS) for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        if len(words) > MAX_BAD_WORDS or not all(words):
            raise InvalidParameter.of("bad_words", f"must be at most {MAX_BAD_WORDS} words, none empty")
        biases = tuple(
            (whole_number("logit_bias", token), _number("logit_bias", bias)) for token, bias in self.logit_bias
        )
        object.__setattr__(self, "logit_bias", biases)
        if len(biases) > MAX_LOGIT_BIASES or not all(abs(bias) <= MAX_LOGIT_BIAS for _, bias in biases):
            raise InvalidParameter.of(
                "logit_bias",
                f"must be at most {MAX_LOGIT_BIASES} biases from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
            )
        try:
            is_too_large = len(self.grammar.encode()) > MAX_GRAMMAR_BYTES if isinstance(self.grammar, str) else True
        except UnicodeEncodeError:
            raise InvalidParameter.of("grammar", "must have no lone surrogates") from None
        if is_too_large:
            raise InvalidParameter.of("grammar", f"must be a text of at most {MAX_GRAMMAR_BYTES} bytes")
        if self.grammar and self.ignore_eos:
            raise InvalidParameter.of("ignore_eos", "an answer with a grammar ends where the grammar does")

    @property
    def names_tokens(self) -> bool:
        """Whether a field names tokens by their ids, which `check_tokens` compares with the vocabulary."""
        return bool(self.stop_token_ids or self.logit_bias or self.bad_words or self.allowed_token_ids)

    def check_tokens(self, vocab_size: int) -> None:
        """Raises InvalidParameter that names the field unless every token id is in the vocabulary."""
        if not self.names_tokens:
            return
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "bad_words": tuple(token for word in self.bad_words for token in word),
            "allowed_token_ids": self.allowed_token_ids,
        }
        for name, tokens in named.items():
            if not all(0 <= token < vocab_size for token in tokens):
                raise InvalidParameter.of(name, f"token ids must be from 0 to {vocab_size - 1}")

    @property
    def edits_logits(self) -> bool:
        """Whether the sampler changes logits before the temperature."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids
        )


SLOT_FIELDS: Final[Mapping[str, PerSlot]] = {
    name: mark
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
}
"""The mark of each PerSlot field, by name, in the order of their declaration."""


def whole_number(name: str, value: object) -> int:
    """`value` as a plain int: ints of any library, no bool, no float. Raises InvalidParameter."""
    if type(value) is int:  # as nearly all are
        return value
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise InvalidParameter.of(name, "must be a whole number")


def _ids(name: str, value: object, most: int) -> tuple[int, ...]:
    """`value` as a tuple of plain ints. Raises InvalidParameter."""
    if not isinstance(value, list | tuple) or len(value) > most:
        raise InvalidParameter.of(name, f"must be a list of at most {most} token ids")
    return tuple(whole_number(name, token) for token in value)


def _number(name: str, value: object) -> float:
    """`value` as a plain float. Raises InvalidParameter for what is no number, or not finite."""
    number = value if type(value) is float else _as_float(name, value)
    if not math.isfinite(number):
        raise InvalidParameter.of(name, "must be finite")
    return number


def _as_float(name: str, value: object) -> float:
    if not isinstance(value, bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)  # type: ignore[arg-type]
    raise InvalidParameter.of(name, "must be a number")


_CONVERSIONS: Final[Mapping[str, Callable[[str, object], int | float]]] = {
    **{name: _number if mark.dtype == "float32" else whole_number for name, mark in SLOT_FIELDS.items()},
    "max_tokens": whole_number,
}


def mix_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: its own for choice 0, else an int64 hashed from both.

    The hash is splitmix64's finaliser (Steele, Lea and Flood 2014) of seed + index * golden ratio.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z > INT64_MAX else z


def params_of_choices(params: SamplingParams, n: int) -> Iterator[SamplingParams]:
    """The parameters of `n` continuations of one prompt: seeds of their own; the first has the prompt's log-probabilities."""
    yield params
    for index in range(1, n):
        yield replace(params, seed=mix_seed(params.seed, index), prompt_logprobs=False)
