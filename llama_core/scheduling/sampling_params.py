"""The sampling parameters of one sequence: their types, ranges and defaults.

The fields marked `PerSlot` are values that a sampler reads on the rank. `execution/sampling_tensors.py` makes a tensor of each,
and `execution/native/sampling.hpp` a field of its C struct, so that a new parameter costs one line here, one in the HTTP schema
and its use in each sampler.
"""

import contextlib
import math
import operator
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_type_hints

from llama_core.errors import InvalidParameter

MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MAX_TEMPERATURE = 1e4  # above it all tokens are equally likely
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

ScalarType = Literal["float32", "int64"]


@dataclass(frozen=True, slots=True)
class PerSlot:
    """Marks a field of SamplingParams that samplers read, and the type in which a rank keeps it."""

    dtype: ScalarType


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one sequence.

    temperature: 0 is greedy. top_p: smallest set of most likely tokens whose probability exceeds it, in (0, 1].
    top_k: at most so many tokens, 0 for all. seed: any int64; the sample at a position depends on (seed, position) alone.
    max_tokens: new tokens at most. logprobs: None for none, n for the sampled token's and those of the n most likely.
    prompt_logprobs: the same for the prompt's tokens. ignore_eos: continue past end-of-sequence until max_tokens.
    """

    temperature: Annotated[float, PerSlot("float32")] = 0.6
    top_p: Annotated[float, PerSlot("float32")] = 0.9
    top_k: Annotated[int, PerSlot("int64")] = 0
    seed: Annotated[int, PerSlot("int64")] = 0
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges, and convert to plain numbers: a wrong one would fail every request of a step on the ranks."""
        for name, dtype in SLOT_FIELDS.items():
            convert = _number if dtype == "float32" else whole_number
            object.__setattr__(self, name, convert(name, getattr(self, name)))
        object.__setattr__(self, "max_tokens", whole_number("max_tokens", self.max_tokens))
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidParameter(f"temperature must be from 0 to {MAX_TEMPERATURE:g}", param="temperature")
        if not 0 < self.top_p <= 1:
            raise InvalidParameter("top_p must be greater than 0 and at most 1", param="top_p")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidParameter(f"top_k must be from 0 (no limit) to {MAX_TOP_K}", param="top_k")
        if not INT64_MIN <= self.seed <= INT64_MAX:
            raise InvalidParameter("seed must fit a signed 64-bit integer", param="seed")
        if not 0 <= self.max_tokens <= INT64_MAX:
            raise InvalidParameter(f"max_tokens must be from 0 to {INT64_MAX}", param="max_tokens")
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", whole_number("logprobs", self.logprobs))
            if not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
                raise InvalidParameter(f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}", param="logprobs")


def _slot_fields() -> dict[str, ScalarType]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    marks = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
    return {name: mark.dtype for name, metadata in marks for mark in metadata if isinstance(mark, PerSlot)}


SLOT_FIELDS: Final = _slot_fields()
"""Name and type of each PerSlot field, in the order of their declaration."""


def whole_number(name: str, value: object) -> int:
    """`value` as a plain int: ints of any library, no bool, no float. Raises InvalidParameter."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise InvalidParameter(f"{name} must be a whole number", param=name)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool | str | bytes):
        raise InvalidParameter(f"{name} must be a number", param=name)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameter(f"{name} must be a number", param=name) from None
    if not math.isfinite(number):
        raise InvalidParameter(f"{name} must be finite", param=name)
    return number


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
