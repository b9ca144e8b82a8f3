"""Guesses how a sequence goes on from how it went on before: prompt lookup (Saxena 2023). Knows nothing of models or steps.

Answers repeat what they answer, and themselves: quotations, names, code that is edited. Whether a guess pays is learned
for each sequence from the guesses that would have been right, which costs nothing while no draft is sent. All depends on
tokens alone, never on time: ranks that schedule for themselves (torchrun) must decide alike.
"""

MAX_DRAFTS_A_ROW = 7  # with the token before them eight, which kernels like
NGRAMS = (3, 2)  # lengths of the endings that are looked up, the most telling first
_FIRST_CHANCE = 0.25
_MEMORY = 8  # guesses, after which an old one counts about a third
# Seven drafts make a step of one row on a CPU up to a third longer, and where the text's end is waited for, nothing is
# under way meanwhile. Beside others that go on, who waits has a row in every second step only.
_MIN_CHANCE = 0.1
_MIN_GAIN_ALONE = 0.5
_MIN_GAIN_BESIDE_OTHERS = 1.5


class PromptLookup:
    """One sequence's n-grams, and `chance`: how likely a guess is to be right.

    Made for a list of tokens that only grows; every method that is given it indexes what is new, O(1) a token.
    """

    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE
        self._num_indexed = 0
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence before the end goes on

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """The `count` tokens that should come next; none if the end of `tokens` occurs nowhere before."""
        self._index(tokens)
        for n in NGRAMS:
            if (begin := self._after.get(tuple(tokens[-n:]))) is not None:
                guess = tokens[begin : begin + count]
                period = len(tokens) - begin  # an occurrence so near that it overlaps its continuation is a loop
                while len(guess) < count:
                    guess.append(guess[-period])
                return guess
        return []

    def observe(self, num_right: int, num_wrong: int) -> None:
        """So many guessed tokens came true, then so many did not."""
        for _ in range(num_right):
            self.chance += (1.0 - self.chance) / _MEMORY
        for _ in range(num_wrong):
            self.chance -= self.chance / _MEMORY

    def num_worthwhile(self, limit: int, *, alone: bool) -> int:
        """How many drafts, up to `limit`, a step should check; 0 when it should rather not wait for any. `alone`: no other
        sequence runs.

        A draft counts only if all before it are right: the n-th with chance ** n.
        """
        reached, gain, count = self.chance, 0.0, 0
        while count < limit and reached > _MIN_CHANCE:
            gain += reached
            reached *= self.chance
            count += 1
        return count if gain >= (_MIN_GAIN_ALONE if alone else _MIN_GAIN_BESIDE_OTHERS) else 0

    def _index(self, tokens: list[int]) -> None:
        end = len(tokens)
        if end == self._num_indexed:
            return
        for n in NGRAMS:
            first = max(n, self._num_indexed)
            if first >= end:
                continue
            # tokens[at - n : at] goes on at `at`, for `at` in first .. end; later occurrences replace earlier ones.
            ngrams = zip(*(tokens[first - n + i : end - n + i] for i in range(n)), strict=True)
            self._after.update(zip(ngrams, range(first, end), strict=True))
        self._num_indexed = end
