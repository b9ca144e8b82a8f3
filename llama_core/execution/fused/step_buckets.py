"""The shapes of steps for which CUDA graphs exist, and the one that holds a given step."""

from bisect import bisect_left

from llama_core.config import EngineConfig
from llama_core.execution.fused.step_memory import CAPTURED_PROMPT_TOKENS, LARGEST_PADDING
from llama_core.execution.fused.step_plan import LaunchShape


def bucket_sizes(largest: int) -> list[int]:
    """Tokens of the decode steps that are captured: powers of two up to 32, then steps of 32, and `largest` itself."""
    sizes = {1 << i for i in range(6)} | set(range(32, largest, 32)) | {largest}
    return sorted(size for size in sizes if size <= largest)


class StepBuckets:
    """Buckets of decode steps by their tokens, and of steps with chunks of prompts by theirs. largest: holds every step."""

    def __init__(self, config: EngineConfig, chunk: int) -> None:
        """chunk: tokens of a tile of a prompt's chunk (`TileSizes`)."""
        max_tokens, max_samples = config.max_step_tokens, config.max_step_samples
        self.largest = LaunchShape.of_bucket(max_tokens, max_samples, chunk)
        self._decode_tokens = bucket_sizes(max_samples)
        self._decodes = [LaunchShape(size, size, 0) for size in self._decode_tokens]
        self._mixed = [
            LaunchShape.of_bucket(size, max_samples, chunk) for size in CAPTURED_PROMPT_TOKENS if size <= max_tokens
        ]
        # Most steps of a long prompt are as large as a step may be.
        self._mixed += [self.largest] if max_tokens not in CAPTURED_PROMPT_TOKENS else []

    @property
    def all(self) -> list[LaunchShape]:
        """All buckets. The largest comes first, so that the graphs of the others fit into its memory."""
        return [*reversed(self._mixed), *reversed(self._decodes)]

    def of(self, shape: LaunchShape) -> LaunchShape:
        """The smallest bucket that holds a step of this shape; the shape itself where padding would cost more than a graph
        saves."""
        if not shape.chunk_tiles:
            return self._decodes[bisect_left(self._decode_tokens, shape.tokens)]
        bucket = next((bucket for bucket in self._mixed if bucket.holds(shape)), shape)
        is_small = bucket.tokens <= CAPTURED_PROMPT_TOKENS[-1]
        return bucket if is_small or bucket.tokens <= LARGEST_PADDING * shape.tokens else shape
