"""The tests' one fake of ranks: no model, a rule for the next token, and only the state that step messages carry.

The scheduler's tests step `FakeRanks` directly; `fake_rank_group` gives it to an engine loop, `fake_runner` to rank actors.

The cache holds, for each position, the tuple of all tokens up to it, in place of keys and values. A row is computed only if
the slot's blocks hold every position before it, or in its sliding window, whichever sequence wrote them. In each step all rows
write before any reads, as in each layer of a model. A wrong message therefore gives a wrong token
or a failed assertion.
"""

import random
import struct
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from llama_core.scheduling.drafting import Drafting, DraftPrice
from llama_core.scheduling.request import Sequence, TokenLogprob
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.step import Embedding, PromptLogprobs, StepInput, StepOutput

EOS = 2
Model = Callable[[list[int], int], int]  # (tokens so far, seed) -> next token


def arbitrary(tokens: list[int], seed: int = 0) -> int:
    """A next token that depends on the seed and on every token before it. About one in twenty is EOS."""
    value = hash((seed, *tokens)) % 1009
    return EOS if value % 20 == 0 else 3 + value % 600


def repetitive(tokens: list[int], seed: int = 0) -> int:
    """A next token that mostly depends on the last two, so the text repeats itself, with changes."""
    chance = hash((seed, *tokens)) % 1009
    if chance % 61 == 0:
        return EOS
    return 3 + (chance if chance % 11 == 0 else hash((seed, *tokens[-2:]))) % 40


def adapted(seed: int, adapter: str) -> int:
    """The seed of a sequence with an adapter, which changes its tokens."""
    return seed + 7919 * sum(adapter.encode())


def continuation(
    prompt: list[int], max_tokens: int, token: Callable[[list[int]], int] = arbitrary, *, ignore_eos: bool = False
) -> list[int]:
    """The tokens that a prompt generates alone, by the rule `token`, without the EOS that ends them."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        following = token(tokens)
        if following == EOS and not ignore_eos:
            break
        tokens.append(following)
    return tokens[len(prompt) :]


def expected_output(seq: Sequence, model: Model = arbitrary) -> list[int]:
    """The tokens that a sequence generates alone."""
    seed, ignore_eos = adapted(seq.params.seed, seq.terms.adapter), seq.params.ignore_eos
    limit = seq.max_length - seq.prompt_len
    return continuation(seq.prompt, limit, lambda tokens: model(tokens, seed), ignore_eos=ignore_eos)


def embedding_of(prompt: list[int], pooling: str) -> bytes:
    """Four numbers that depend on the pooling and on every token."""
    chance = random.Random(f"{pooling}{prompt}")
    return struct.pack("<4f", *(chance.uniform(-1, 1) for _ in range(4)))


class Oracle(Drafting):
    """Proposes drafts in every step: some of the tokens that will be sampled, then wrong ones."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__(self)
        self._model = model
        self._seed = seed

    def num_worthwhile(self, limit: int, price: DraftPrice) -> int:
        return max(0, limit)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        truth = list(tokens)
        while len(truth) < len(tokens) + count:
            truth.append(self._model(truth, self._seed))
        num_right = hash((*tokens, 1)) % (count + 2)
        return [token if i < num_right else token ^ 1 for i, token in enumerate(truth[len(tokens) :])]


class FakeRanks:
    """Answers a step message as a group of ranks does. A token's logprob, where its sequence wants one, is its position, as a
    float.

    A slot with a grammar has a share `deferrals` of its rows deferred, together with its rows that are in flight behind those.
    """

    def __init__(self, block_size: int, model: Model = arbitrary, window: int = 0, deferrals: float = 0.0) -> None:
        self.deferrals = deferrals
        self._deferred_at: dict[int, int | None] = {}  # slots with a grammar: the position to be sampled again
        self.block_size = block_size
        self.window = window  # positions that a position reads, its own included; 0: all
        self.model = model
        self.cache: dict[int, tuple[str, tuple[int, ...]]] = {}  # physical position -> adapter, and tokens up to it
        self.num_computed = 0
        self.num_steps = 0
        self.non_finite_at: tuple[int, int] | None = None  # (slot, position of the sampled token)
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}
        self._wants_logprobs: dict[int, bool] = {}
        self._places: dict[int, int] = {}  # of each slot's adapter
        self._adapters = {0: ""}  # by place
        self._pooled: dict[int, list[int]] = {}  # slot -> positions pooled so far
        self._pools: dict[int, tuple[str, range]] = {}  # slot -> pooling, and the positions that it needs
        self._prompt_logprobs: dict[int, int] = {}  # slot -> prompt length, where prompt logprobs are requested

    def step(self, batch: StepInput) -> StepOutput:
        self.num_steps += 1
        self._adapters |= {load.place: load.digest for load in batch.adapters}
        for init in batch.admit:
            self._tokens[init.slot] = list(init.tokens)
            self._blocks[init.slot] = list(init.blocks)
            self._seeds[init.slot] = init.params.seed
            self._wants_logprobs[init.slot] = init.params.logprobs is not None
            self._places[init.slot] = init.adapter_place
            self._deferred_at.pop(init.slot, None)
            if init.params.grammar:
                self._deferred_at[init.slot] = None
            num, pooling = len(init.tokens), init.params.pooling
            needs = {"mean": range(num), "first": range(1), "last": range(num - 1, num)}.get(pooling, range(0))
            self._pools[init.slot] = pooling, needs
            self._prompt_logprobs[init.slot] = len(init.tokens) if init.prompt_logprobs else 0
        for slot, block in batch.grow:
            self._blocks[slot].append(block)
        for slot, start, drafts in batch.drafts:
            del self._tokens[slot][start:]
            self._tokens[slot] += drafts
        assert len({row.slot for row in batch.rows}) == len(batch.rows), "two rows of one slot"
        sampled, logprobs, non_finite = list[int](), list[TokenLogprob | None](), list[int]()
        prompt_logprobs: list[PromptLogprobs] = []
        deferred: list[int] = []
        embeddings: list[Embedding] = []
        for row in batch.rows:
            assert row.start + row.length <= len(self._tokens[row.slot]), "a row has tokens that no message carried"
            self._write(row.slot, row.start, row.start + row.length)
        for index, (slot, start, length, samples, num_drafts) in enumerate(batch.rows):
            tokens, end = self._tokens[slot], start + length
            self._read(slot, start, end)
            values = [TokenLogprob(float(p), ()) for p in range(start + 1, min(end + 1, self._prompt_logprobs[slot]))]
            if values:
                prompt_logprobs.append(PromptLogprobs(index, start, values))
            kind, needs = self._pools[slot]
            if start <= needs.start < end:
                self._pooled[slot] = []
            if pooled := [at for at in range(start, end) if at in needs]:
                self._pooled[slot] += pooled
                if pooled[-1] == needs[-1]:
                    assert self._pooled[slot] == list(needs), "a position was left out"
                    embeddings.append(Embedding(index, embedding_of(tokens, kind)))
            if samples:
                seed = adapted(self._seeds[slot], self._adapter(slot))
                of_row = [self.model(tokens[:at], seed) for at in range(end - num_drafts, end + 1)]
                if self._is_deferred(slot, end - num_drafts):
                    deferred += range(len(sampled), len(sampled) + len(of_row))
                    of_row = [0] * len(of_row)
                non_finite += [
                    len(sampled) + i for i in range(len(of_row)) if (slot, end - num_drafts + i) == self.non_finite_at
                ]
                sampled += of_row
                wants = self._wants_logprobs[slot]
                logprobs += [TokenLogprob(float(at), ()) if wants else None for at in range(end - num_drafts, end + 1)]
                tokens[end - num_drafts :] = of_row
        return StepOutput(
            batch.epoch,
            batch.step,
            sampled,
            logprobs,
            prompt_logprobs,
            non_finite,
            deferred=deferred,
            embeddings=embeddings,
        )

    def _is_deferred(self, slot: int, position: int) -> bool:
        if slot not in self._deferred_at:
            return False
        at = self._deferred_at[slot]
        is_void = at is not None and position != at
        assert not is_void or position > (at or 0), "a row before the one that was deferred"
        if is_void or hash((self.num_steps, slot, 5)) % 1009 < 1009 * self.deferrals:
            self._deferred_at[slot] = at or position
            return True
        self._deferred_at[slot] = None
        return False

    def _write(self, slot: int, start: int, end: int) -> None:
        tokens = tuple(self._tokens[slot][:end])
        for position in range(start, end):
            self.cache[self._physical(slot, position)] = self._adapter(slot), tokens[: position + 1]
        self.num_computed += end - start

    def _read(self, slot: int, start: int, end: int) -> None:
        tokens = tuple(self._tokens[slot][:end])
        for position in range(max(0, start + 1 - self.window) if self.window else 0, end):
            assert self.cache[self._physical(slot, position)] == (self._adapter(slot), tokens[: position + 1]), (
                "a cached position holds other tokens"
            )

    def _adapter(self, slot: int) -> str:
        return self._adapters[self._places[slot]]

    def _physical(self, slot: int, position: int) -> int:
        return self._blocks[slot][position // self.block_size] * self.block_size + position % self.block_size


def run_to_end(scheduler: Scheduler, ranks: FakeRanks, sequences: Seq[Sequence] = (), depth: int = 1) -> int:
    """Run all sequences to their end, `depth` steps in flight. Returns the number of steps."""
    before = ranks.num_steps
    for seq in sequences:
        scheduler.add(seq)
    in_flight: deque[StepOutput] = deque()
    while scheduler.has_work or in_flight:
        if len(in_flight) < depth and (batch := scheduler.schedule()) is not None:
            in_flight.append(ranks.step(batch))
        else:
            scheduler.commit(in_flight.popleft())
    assert scheduler.pool.num_used == 0
    return ranks.num_steps - before
