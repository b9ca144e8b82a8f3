"""Sizes of the sampling kernels' buffers. The memory plan needs them also where Triton is absent."""

from typing import Final

CHUNK: Final = 4096  # logits that one program reads
BINS: Final = 2048  # bins of a row's probabilities: 32 for each power of two, down to 2^-43
MAX_REPLICAS: Final = 4  # copies of a row's bins, so that atomic additions of equal logits do not all meet in one bin
TOP_BLOCK: Final = 32  # a power of two, at least MAX_TOP_LOGPROBS


def num_chunks(vocab: int) -> int:
    return -(-vocab // CHUNK)


def num_replicas(vocab: int) -> int:
    return min(MAX_REPLICAS, num_chunks(vocab))


def sampler_bytes(rows: int, vocab: int) -> int:
    """Bytes of `sampling_kernels.SamplingBuffers` and `logprob_kernels.LogprobBuffers`."""
    chunks = num_chunks(vocab)
    sampling = 8 * (vocab + chunks + num_replicas(vocab) * BINS)
    logprobs = chunks * (4 + 8 * TOP_BLOCK)
    return rows * (sampling + logprobs)
