"""Faults of the kernels that sample: the sampling itself, logit rules, and logprobs."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

SAMPLES, LIMITS, EDITS, LOGPROBS, ZEROS, REUSE = (
    (f"{TESTS}/test_fused_sampling.py", f"interpreter and {check}")
    for check in ("samples", "limits", "edits", "logprobs", "zeros", "reuse")
)
LARGE = (f"{TESTS}/test_fused_sampling.py", "interpreter and large", "--full")


SAMPLING_MUTANTS = (
    # The sampling itself.
    Mutant(
        "a limit that ends a bin early",
        "nucleus_kernels",
        "bin = tl.sum((reached <= target)",
        "bin = tl.sum((reached < target)",
        LIMITS,
    ),
    Mutant("a bisection that leaves out bits", "nucleus_kernels", "bit = bit >> 1", "bit = bit >> 2", SAMPLES),
    Mutant(
        "equal tokens that are all before themselves",
        "nucleus_kernels",
        "threshold + 1, shift",
        "threshold, shift",
        LIMITS,
    ),
    Mutant("the first of equal tokens always", "nucleus_kernels", "(rank == wanted)", "(rank == 0)", LIMITS),
    Mutant("a nucleus without its last token", "nucleus_kernels", "// one + 1) * one", "// one) * one", LIMITS),
    Mutant(
        "one token more than top_k", "nucleus_kernels", "(top_k - count) * one", "(top_k - count + 1) * one", LIMITS
    ),
    Mutant(
        "a random number that neighbouring positions share",
        "nucleus_kernels",
        "position.to(tl.uint64, bitcast=True))",
        "(position // 2).to(tl.uint64, bitcast=True))",
        SAMPLES,
    ),
    Mutant(
        "a list longer than its first part",
        "nucleus_kernels",
        "for first in range(list_tile, count, list_tile):",
        "for first in range(list_tile, 0, list_tile):",
        LARGE,
    ),
    Mutant("a token that min_p keeps", "sampling_kernels", "(p >= tl.load(min_ps", "(p > tl.load(min_ps", SAMPLES),
    Mutant("bins of the step before", "sampling_kernels", "if chunk < replicas:", "if chunk < 0:", REUSE),
    Mutant(
        "logits below zero in the wrong order",
        "sampling_kernels",
        "order = bits ^ ((bits >> 31) & 0x7FFFFFFF)\n",
        "order = bits\n",
        LOGPROBS,
    ),
    Mutant("a zero that is less than another", "sampling_kernels", "tl.where(x == 0.0, 0.0, x)", "x", ZEROS),
    # Rules.
    Mutant("biased tokens that are delayed", "logit_kernels", "is_early & (index < num_delayed)", "is_early", EDITS),
    Mutant(
        "a repetition that the prompt has no part in",
        "logit_kernels",
        "begin = tl.where(repetition == 1.0, prompt_length, 0)",
        "begin = prompt_length",
        EDITS,
    ),
    Mutant(
        "a prompt that counts as generated",
        "logit_kernels",
        "mask=(index >= prompt_length) & (index < position)",
        "mask=index < position",
        EDITS,
    ),
    Mutant("a penalty for each use of a token", "logit_kernels", "tl.atomic_xchg(", "tl.atomic_or(", EDITS),
    Mutant(
        "uses that nobody counted",
        "logit_kernels",
        "tl.zeros([block], tl.int32), mask=inside",
        "token, mask=inside & (token < 0)",
        EDITS,
    ),
    Mutant("a bad word that begins in the prompt", "logit_kernels", "(before >= prompt_length) & ", "", EDITS),
    Mutant("the mask of another row", "logit_kernels", "masks + index * mask_words", "masks + row * mask_words", EDITS),
    # Logprobs.
    Mutant("the most likely token again and again", "logprob_kernels", "keys < latest", "keys <= latest", LOGPROBS),
    Mutant(
        "sums of chunks with factors of their own",
        "logprob_kernels",
        "total * tl.exp(of_chunk - highest)",
        "total",
        LOGPROBS,
    ),
)
