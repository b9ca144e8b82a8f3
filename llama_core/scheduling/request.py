"""A request, and one sequence of it with its state in the scheduler. Knows nothing of text, tensors, Ray or HTTP."""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from llama_core.errors import ContextLengthExceeded, InvalidParameter, LlamaError
from llama_core.scheduling.drafting import Drafting
from llama_core.scheduling.sampling_params import SamplingParams, params_of_choices, whole_number

log = logging.getLogger(__name__)


class FinishReason(StrEnum):
    """Why a sequence has ended."""

    STOP = "stop"  # end-of-sequence token, or a stop string
    LENGTH = "length"  # max_tokens or the context reached
    ABORT = "abort"  # the client disconnected or cancelled
    ERROR = "error"  # `Sequence.error` says which


def check_length(
    num_tokens: int, num_new: int, max_seq_len: int, *, param: str = "prompt", is_lower_bound: bool = False
) -> None:
    """Raises ContextLengthExceeded unless a prompt of `num_tokens` tokens leaves the context room for `num_new` ones, 0 or 1.

    param: the prompt's field. is_lower_bound: the prompt has at least `num_tokens` tokens; the message says so. LangChain and
    LiteLLM recognize their context-window errors by the words "Input tokens exceed the configured limit of N tokens".
    """
    if num_tokens + num_new <= max_seq_len:
        return
    limit = f"Input tokens exceed the configured limit of {max_seq_len - num_new} tokens"
    reason = f"the context of {max_seq_len} less one for the answer" if num_new else "which is the context"
    size = f"{'at least ' if is_lower_bound else ''}{num_tokens} tokens"
    raise ContextLengthExceeded.of(param, f"{limit}, {reason}: shorten the prompt, which has {size}")


def check_prompt(prompt: Seq[int], vocab_size: int, max_seq_len: int) -> list[int]:
    """The prompt as plain ints. Raises InvalidParameter or ContextLengthExceeded unless they are tokens that fit."""
    if not len(prompt):
        raise InvalidParameter("a prompt must have at least one token", param="prompt")
    check_length(len(prompt), 0, max_seq_len)
    tokens = list(prompt)
    if set(map(type, tokens)) != {int}:  # the fastest check of thousands of ids
        tokens = [whole_number("prompt", token) for token in tokens]
    if not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise InvalidParameter(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")
    return tokens


BACKGROUND: Final = 100  # the priority of requests that run only while there are no others


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose a request is, and how it is served; the same for all of its sequences.

    owner: owners share the capacity fairly. priority: the lowest number is served first, BACKGROUND while there is no other.
    cache_scope: cached blocks are shared within one scope. adapter: the digest of a LoRA adapter. request_id: for log lines,
    and to abort.
    """

    owner: str = ""
    priority: int = 0
    cache_scope: str = ""
    adapter: str = ""
    request_id: str = ""

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks of the engine. HTTP bodies and calls by handle become one; its choices become sequences.

    Choice i of prompt p has index p * n + i; choice 0 has the request's own seed, as with n = 1.
    """

    prompts: Seq[list[int]]
    params: Seq[SamplingParams]  # one for each prompt, because the default max_tokens depends on the prompt's length
    n: int = 1
    stop: tuple[str, ...] = ()
    terms: Terms = Terms()
    skip_special_tokens: bool = True  # the text has no names of control tokens
    shown_tokens: frozenset[int] = frozenset()  # but of these

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def choices(self) -> Iterator[tuple[list[int], SamplingParams]]:
        for prompt, params in zip(self.prompts, self.params, strict=True):
            for own in params_of_choices(params, self.n):
                yield prompt, own


def sequences_of(request: Request, vocab_size: int, max_seq_len: int) -> "list[Sequence]":
    """The sequences of a request's choices. Raises InvalidParameter or ContextLengthExceeded."""
    prompts = [check_prompt(prompt, vocab_size, max_seq_len) for prompt in request.prompts]
    for params in {id(params): params for params in request.params}.values():
        params.check_tokens(vocab_size)
    sequences, progress = [], RequestProgress()
    for prompt, params in replace(request, prompts=prompts).choices():
        max_length = min(max_seq_len, len(prompt) + params.max_tokens)
        if params.min_tokens > (room := max_length - len(prompt)):
            raise InvalidParameter(f"min_tokens must be at most {room}: the prompt leaves no more", param="min_tokens")
        sequences.append(Sequence(prompt, params, max_length, request.terms, progress))
    return sequences


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log of the raw softmax (no temperature, no top-p) at one position; `top` is sorted, most likely first.

    `top` is a tuple: the garbage collector visits each list again in every full pass, and a request may have 500,000.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class RequestProgress:
    """What the sequences of one request share. has_begun: one of them has been admitted, here or on another engine."""

    has_begun: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the tokens generated for it. No other object keeps these tokens.

    The first `prompt_len` of `tokens` are the prompt, the rest was generated (an end-of-sequence token is not kept).
    Three counts of tokens describe the progress of the ranks:

        0 .. scheduled            keys and values computed, or being computed by a step in flight
        scheduled .. length       known tokens still to be sent through the model
        length .. length+inflight sampled by a step whose output has not been read back

    Drafts: a step that also checks `num_drafts` proposed tokens may turn out to have sampled up to so many more. Until it is
    read back, no other step has the sequence.
    Deferral: a step samples nothing for the sequence where the mask of its grammar was late. Samples of the sequence's later
    steps in flight are void then. Behind the last of them, the latest known token is computed again.
    Preemption: a preempted sequence, or one whose ranks failed, continues from scheduled = 0, or from its cached prefix. Tokens
    are never lost.
    """

    prompt: list[int]
    params: SamplingParams
    max_length: int  # prompt + generated tokens at most
    terms: Terms = Terms()
    progress: RequestProgress = field(default_factory=RequestProgress)
    tokens: list[int] = field(init=False)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)  # of its positions in order, the released ones included
    num_released: int = 0  # of `blocks`, the first, which lie outside the sliding window and may hold other tokens now
    scheduled: int = 0
    inflight: int = 0
    num_drafts: int = 0
    is_deferred: bool = False  # the latest of its rows that was read back has sampled no token
    drafting: Drafting | None = None  # made when drafts could pay
    forced: tuple[int, list[int]] = (0, [])  # a position and the tokens that the grammar expects from there on
    block_hashes: list[bytes] = field(default_factory=list)  # prefix hashes of its full blocks, as far as computed
    num_registered: int = 0  # of `blocks`, those registered in the prefix cache
    num_cached: int | None = None  # prompt tokens found in the cache; None before it has run
    prompt_key: int = 0  # equal for equal prompts that wait
    num_expected: int = 0  # tokens that it is expected to compute once admitted; 0: all
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each generated token, when asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt positions 1, 2, ...
    embedding: bytes | None = None  # float32 [dim], of a sequence with `params.pooling`
    is_trusted: bool = False  # kept by quarantine.py: these ranks have sampled for it, and no failure is on its record
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # of its parameters' stop_token_ids, the one that ended it
    error: LlamaError | None = None

    def __post_init__(self) -> None:
        assert self.prompt, "a sequence has at least one token"
        assert self.max_length >= len(self.prompt)
        self.tokens = list(self.prompt)

    def continued(self) -> "Sequence":
        """A new sequence that goes on after these tokens, which are computed again."""
        seq = Sequence(self.prompt, self.params, self.max_length, self.terms, self.progress)
        seq.tokens += self.output
        seq.logprobs = list(self.logprobs)
        if not self.wants_prompt_logprobs:
            seq.prompt_logprobs = self.prompt_logprobs
        return seq

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[self.num_released :] if self.num_released else self.blocks

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Known tokens still to be sent through the model."""
        return self.length - self.scheduled

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def defer(self) -> None:
        """Note that a row of this sequence was read back without a sample. Its rows in flight are void too.

        After the last of them, count the latest known token as not computed, so that the next row samples after it again.
        """
        self.inflight -= 1
        self.num_drafts = 0
        self.is_deferred = True
        if self.slot is not None and not self.inflight:  # else the sequence was preempted, or another row is in flight
            self.scheduled = self.length - 1

    def cut(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` generated tokens: an earlier token of the same step has ended the text."""
        assert 0 <= num_tokens <= self.length - self.prompt_len
        del self.tokens[self.length - num_tokens :]
        del self.logprobs[self.length - self.prompt_len :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every position of the prompt has to be computed, also one whose keys and values are cached."""
        return self.wants_prompt_logprobs or self.params.pooling in ("mean", "first")


def describe_request(prompts: Seq[Seq[int]], max_gen_len: int, temperature: float, top_p: float) -> str:
    """One line for the log, as in Meta's reference."""
    longest = max((len(prompt) for prompt in prompts), default=0)
    return (
        f"batch size {len(prompts)}, prompt length {longest}, max_gen_len {max_gen_len}, "
        f"temperature {temperature:g}, top_p {top_p:g}"
    )


def log_unfinished(sequences: Seq[Sequence]) -> None:
    """Log, at INFO because it is usual, how many sequences reached their limit before the model ended them."""
    unfinished = sum(seq.finish_reason is FinishReason.LENGTH for seq in sequences)
    if unfinished:
        log.info("%d of %d generations ended without EOS, at their limit", unfinished, len(sequences))
