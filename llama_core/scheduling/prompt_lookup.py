"""Drafts the continuation of a sequence from its earlier tokens: prompt lookup (Saxena 2023). Knows nothing of models or steps.

Answers repeat their prompts, and themselves: quotations, names, code that is edited.
"""

NGRAMS = (3, 2)  # lengths of the suffixes that are looked up, the most specific first


class PromptLookup:
    """Implements `drafting.Drafter` for one sequence.

    Made for a list of tokens that only grows; every method that is given the list indexes its new tokens, O(1) a token.
    """

    def __init__(self) -> None:
        self._num_indexed = 0
        # n-gram -> the position after its latest occurrence before the end
        self._after: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """The `count` tokens that followed the latest earlier occurrence of the suffix of `tokens`; [] if there is none."""
        self._index(tokens)
        for n in NGRAMS:
            if (begin := self._after.get(tuple(tokens[-n:]))) is not None:
                drafts = tokens[begin : begin + count]
                period = len(tokens) - begin  # an occurrence that overlaps its continuation is a loop
                while len(drafts) < count:
                    drafts.append(drafts[-period])
                return drafts
        return []

    def _index(self, tokens: list[int]) -> None:
        end = len(tokens)
        if end == self._num_indexed:
            return
        for n in NGRAMS:
            first = max(n, self._num_indexed)
            if first >= end:
                continue
            # tokens[at - n : at] continues at `at`, for `at` in first .. end; later occurrences replace earlier ones.
            if end - first == 1:  # as after most steps
                self._after[tuple(tokens[first - n : first])] = first
                continue
            ngrams = zip(*[tokens[first - n + i : end - n + i] for i in range(n)], strict=True)
            self._after.update(zip(ngrams, range(first, end), strict=True))
        self._num_indexed = end
