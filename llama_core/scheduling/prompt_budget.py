"""Decides how many tokens of prompts one step computes, and which prompt may be computed before an older one.

Prompt tokens delay the decodes in the same step. A long prompt would delay the first token of each short one that comes after
it, so a share of every step is for prompts that are much shorter than the oldest one, or of a higher priority.
"""

from typing import Final

from llama_core.scheduling.request import Sequence

# Prompt tokens beside decodes, and of each prompt in a burst: most prompts fit into one step; longer ones come in several.
# `use_chunk` raises it for fast ranks.
TOKENS_A_PROMPT: Final = 256
TOKENS_ALONE: Final = 2 * TOKENS_A_PROMPT  # prompt tokens of a step without decodes


class PromptBudget:
    """Limits, in tokens. max_tokens: prompt tokens of one step. chunk: tokens of one prompt in a step with decodes."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.chunk = TOKENS_A_PROMPT

    def limit(self, num_tokens: int) -> None:
        """Put at most this many tokens of prompts into one step."""
        self.max_tokens = num_tokens

    def use_chunk(self, num_tokens: int) -> None:
        """Put up to `num_tokens` tokens of a prompt into a step with decodes; TOKENS_A_PROMPT if that is more."""
        self.chunk = max(TOKENS_A_PROMPT, num_tokens)

    def of_step(self, num_decodes: int, num_prompts: int) -> int:
        """The prompt tokens of a step with `num_decodes` decodes, while `num_prompts` prompts have tokens to compute.

        A prompt that comes alone is computed in chunks: a long one then delays the decodes a little in each of many steps. In a
        burst, a third of all sequences or more wait for their first token. Few long steps then delay all sequences less than
        many short ones, so every prompt may add a chunk.
        """
        budget = self.chunk if num_decodes else 2 * self.chunk
        if 2 * num_prompts >= num_decodes:
            budget = max(budget, self.chunk * num_prompts)
        return min(budget, self.max_tokens)

    def for_oldest(self, budget: int, num_taken: int) -> int:
        """What is left of a step's prompt tokens for the oldest prompt, when shorter ones have taken `num_taken`, which is at
        most `for_shorter`. Where they have taken some, the oldest has no more than a chunk or a third: they wait for it."""
        left = budget - num_taken
        return min(left, max(self.chunk, budget - for_shorter(budget))) if num_taken else left


def for_shorter(budget: int) -> int:
    """The share of a step's prompt tokens that shorter prompts may take before the oldest one. Without end they slow it to a
    third; it makes each of them half as long again."""
    return budget * 2 // 3


def overtakes(seq: Sequence, num_left: int, older: Sequence) -> bool:
    """Whether a prompt of which `num_left` tokens are left to compute may be computed before the rest of an older one."""
    if seq.terms.priority != older.terms.priority:
        return seq.terms.priority < older.terms.priority
    return 2 * num_left <= older.num_pending
