"""Decides how many tokens of prompts one step computes. They delay the decodes beside them by the time that they take."""

from typing import Final

# Prompt tokens beside decodes, and of each prompt in a burst: most prompts fit into one step; longer ones come in several.
# `use_chunk` raises it for fast ranks.
TOKENS_A_PROMPT: Final = 256
TOKENS_ALONE: Final = 2 * TOKENS_A_PROMPT  # prompt tokens of a step without decodes


class PromptBudget:
    """Limits of prompt tokens. max_tokens: of one step. chunk: of one prompt in a step beside decodes."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.chunk = TOKENS_A_PROMPT

    def limit(self, num_tokens: int) -> None:
        """Put at most this many tokens of prompts into one step."""
        self.max_tokens = num_tokens

    def use_chunk(self, num_tokens: int) -> None:
        """Put so many tokens of a prompt into a step beside decodes, but TOKENS_A_PROMPT at least."""
        self.chunk = max(TOKENS_A_PROMPT, num_tokens)

    def of_step(self, num_decodes: int, num_prompts: int) -> int:
        """Prompt tokens of a step with so many decodes, where so many prompts could have tokens.

        A prompt that comes alone is computed in chunks, so that a long one delays the decodes in many short steps. Where many
        come at once, a third of all sequences or more wait for their first token, and few long steps delay them and the others
        less than many short ones: every prompt may add a chunk.
        """
        budget = self.chunk if num_decodes else 2 * self.chunk
        if 2 * num_prompts >= num_decodes:
            budget = max(budget, self.chunk * num_prompts)
        return min(budget, self.max_tokens)
