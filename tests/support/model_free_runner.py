"""Ranks without a model, which know only what the messages told them: a wrong message gives a wrong token.

What stands in for a position's keys and values is the tuple of all tokens up to it. A row may only be computed if every
position before it is in the slot's blocks, whoever put it there.
"""

from collections.abc import Callable

from llama_core.scheduling.prompt_lookup import PromptLookup
from llama_core.scheduling.request import Sequence, TokenLogprob
from llama_core.scheduling.step import PromptLogprobs, StepInput, StepOutput

EOS = 2
Model = Callable[[list[int], int], int]  # tokens so far, seed -> the next one


def arbitrary(tokens: list[int], seed: int = 0) -> int:
    """Depends on every token before it; about one in twelve is the end."""
    value = hash((seed, *tokens)) % 1009
    return EOS if value % 12 == 0 else 3 + value


def repetitive(tokens: list[int], seed: int = 0) -> int:
    """Mostly depends on the last two tokens, so that it falls into loops, and leaves them now and then."""
    chance = hash((seed, *tokens)) % 1009
    if chance % 61 == 0:
        return EOS
    return 3 + (chance if chance % 11 == 0 else hash((seed, *tokens[-2:]))) % 40


def expected_output(seq: Sequence, model: Model = arbitrary) -> list[int]:
    """What the sequence generates by itself."""
    tokens = list(seq.prompt)
    while len(tokens) < seq.max_length:
        token = model(tokens, seq.params.seed)
        if token == EOS and not seq.params.ignore_eos:
            break
        tokens.append(token)
    return tokens[seq.prompt_len :]


class Oracle(PromptLookup):
    """Always proposes: of the tokens that will come, as many right ones as it pleases, then wrong ones."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        self._model = model
        self._seed = seed

    def num_worthwhile(self, limit: int, *, alone: bool) -> int:
        return max(0, limit)

    def guess(self, tokens: list[int], count: int) -> list[int]:
        truth = list(tokens)
        while len(truth) < len(tokens) + count:
            truth.append(self._model(truth, self._seed))
        num_right = hash((*tokens, 1)) % (count + 2)
        return [token if i < num_right else token ^ 1 for i, token in enumerate(truth[len(tokens) :])]


class FakeRanks:
    """`step` answers as the ranks do. A token's logprob is its position, as a float."""

    def __init__(self, block_size: int, model: Model = arbitrary) -> None:
        self.block_size = block_size
        self.model = model
        self.cache: dict[int, tuple[int, ...]] = {}  # physical position -> its token and all before it
        self.num_computed = 0
        self.num_steps = 0
        self.non_finite_at: tuple[int, int] | None = None  # (slot, position of the draw)
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}
        self._prompt_logprobs: dict[int, int] = {}  # slot -> tokens that were sent, of those that ask

    def step(self, batch: StepInput) -> StepOutput:
        self.num_steps += 1
        for init in batch.admit:
            self._tokens[init.slot] = list(init.tokens)
            self._blocks[init.slot] = list(init.blocks)
            self._seeds[init.slot] = init.params.seed
            self._prompt_logprobs[init.slot] = len(init.tokens) if init.prompt_logprobs else 0
        for slot, block in batch.grow:
            self._blocks[slot].append(block)
        for slot, start, drafts in batch.drafts:
            del self._tokens[slot][start:]
            self._tokens[slot] += drafts
        assert len({row.slot for row in batch.rows}) == len(batch.rows), "two rows of one slot"
        drawn, logprobs, non_finite = list[int](), list[TokenLogprob | None](), list[int]()
        prompt_logprobs: list[PromptLogprobs] = []
        for index, (slot, start, length, samples, num_drafts) in enumerate(batch.rows):
            tokens, end = self._tokens[slot], start + length
            assert end <= len(tokens), "a row of tokens that the rank does not know"
            self._compute(slot, start, end)
            values = [TokenLogprob(float(p), []) for p in range(start + 1, min(end + 1, self._prompt_logprobs[slot]))]
            if values:
                prompt_logprobs.append(PromptLogprobs(index, start, values))
            if samples:
                draws = [self.model(tokens[:at], self._seeds[slot]) for at in range(end - num_drafts, end + 1)]
                non_finite += [
                    len(drawn) + i for i in range(len(draws)) if (slot, end - num_drafts + i) == self.non_finite_at
                ]
                drawn += draws
                logprobs += [TokenLogprob(float(at), []) for at in range(end - num_drafts, end + 1)]
                tokens[end - num_drafts :] = draws
        return StepOutput(batch.epoch, batch.step, drawn, logprobs, prompt_logprobs, non_finite)

    def _compute(self, slot: int, start: int, end: int) -> None:
        tokens = tuple(self._tokens[slot][:end])
        for position in range(start, end):
            self.cache[self._physical(slot, position)] = tokens[: position + 1]
        for position in range(end):
            assert self.cache[self._physical(slot, position)] == tokens[: position + 1], "what is cached is another's"
        self.num_computed += end - start

    def _physical(self, slot: int, position: int) -> int:
        return self._blocks[slot][position // self.block_size] * self.block_size + position % self.block_size
