"""Faults of attention: masks and indices of its kernel, the splits of a decode, and the plan of its tiles."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

ATTENTION = (f"{TESTS}/test_fused_attention.py", "interpreter")
BORDERS = (f"{TESTS}/test_fused_attention.py", "see_other_splits")
SHARES = (f"{TESTS}/test_fused_attention.py", "share_its_positions")
GROWING = (f"{TESTS}/test_fused_attention.py", "splits_grow")
COMBINED = (f"{TESTS}/test_fused_attention.py", "combines_them_to_the_same_bits")
PLAN = (f"{TESTS}/test_fused_attention.py", "plan or splits")

_SPLITS = "../../step_time/attention_splits"

ATTENTION_MUTANTS = (
    Mutant(
        "a query that sees the next position",
        "attention_kernels",
        "(position[None, :] < length[:, None])",
        "(position[None, :] <= length[:, None])",
        ATTENTION,
    ),
    Mutant(
        "a window without its first position",
        "split_kernels",
        "tl.maximum(length - window, 0)",
        "tl.maximum(length - window + 1, 0)",
        ATTENTION,
    ),
    Mutant(
        "queries of a tile that share the first one's window",
        "attention_kernels",
        "(position[None, :] >= first_seen[:, None]) & ",
        "",
        ATTENTION,
    ),
    Mutant(
        "reads of blocks that belong to others",
        "attention_kernels",
        "(position >= seen) & (position < end)",
        "position < end",
        ATTENTION,
    ),
    Mutant(
        "no position seen yet",
        "attention_kernels",
        'tl.where(highest == float("-inf"), 0.0, highest)',
        "highest",
        ATTENTION,
    ),
    Mutant(
        "sums that keep their old factor",
        "attention_kernels",
        "mixed = mixed * kept[:, None] + tl.dot",
        "mixed = mixed + tl.dot",
        ATTENTION,
    ),
    Mutant(
        "a split that is left out",
        "split_kernels",
        "begin = split_of(first_seen_of(length, window), split_unit, split_bits)",
        "begin = split_of(first_seen_of(length, window), split_unit, split_bits) + 1",
        ATTENTION,
    ),
    Mutant(
        "a split behind the last that has a weight",
        "split_kernels",
        'mask=split < end, other=float("-inf")',
        "mask=split < end, other=0.0",
        ATTENTION,
    ),
    Mutant(
        "positions of a chunk's own tokens that are not masked",
        "attention_kernels",
        "if first + tile > all_see:",
        "if first > all_see:",
        ATTENTION,
    ),
    Mutant(
        "a split that begins with the sums of the one before",
        "attention_kernels",
        "                    mixed, total, best = _nothing_seen(rows, dim_block)\n                    split += 1\n",
        "                    split += 1\n",
        ATTENTION,
    ),
    Mutant(
        "programs that leave out the splits between theirs",
        "attention_kernels",
        "stop = tl.minimum(split_begin(next_split, split_unit, split_bits), end)",
        "stop = tl.minimum(split_begin(split + 1, split_unit, split_bits), end)",
        ATTENTION,
    ),
    Mutant(
        "masks of the positions that only a tile's last query sees",
        "attention_kernels",
        "                first + 1,\n                kv_head,",
        "                first + count,\n                kv_head,",
        BORDERS,
    ),
    Mutant(
        "a split before the window of a tile's later queries",
        "attention_kernels",
        "is_query & (first_seen < split_end) &",
        "is_query &",
        BORDERS,
    ),
    Mutant(
        "a split behind a tile's first queries",
        "attention_kernels",
        " & (length > split_begin(split, split_unit, split_bits))",
        "",
        BORDERS,
    ),
    Mutant(
        "a share of positions that leaves out a split at its begin",
        "attention_kernels",
        "split = split_of(own - 1, split_unit, split_bits) + 1",
        "split = split_of(own, split_unit, split_bits) + 1",
        BORDERS,
    ),
    Mutant(
        "a decode whose first program reads all positions",
        "attention_kernels",
        "share = tl.cdiv(end - begin, tl.num_programs(2))",
        "share = end - begin",
        SHARES,
    ),
    Mutant(
        "splits stored by another number than they are read",
        "attention_kernels",
        "* n_splits + split % n_splits",
        "* n_splits + split % 2",
        ATTENTION,
    ),
    Mutant(
        "parts of one tile over those of another",
        "attention_kernels",
        "token = decode_token + index",
        "token = decode_token + index // 2",
        ATTENTION,
    ),
    Mutant(
        "query heads with the keys of others",
        "attention_kernels",
        "head = kv_head * group + row % group",
        "head = kv_head + row % group",
        ATTENTION,
    ),
    Mutant(
        "a split outside a query's window that is combined",
        "attention_kernels",
        "combined = tl.where(sees[:, None], both, combined)",
        "combined = both",
        COMBINED,
    ),
    Mutant(
        "combined splits without their new common factor",
        "attention_kernels",
        "combined_best = tl.where(sees, highest, combined_best)",
        "combined_best = tl.where(sees, log_sum, combined_best)",
        COMBINED,
    ),
    Mutant(
        "a tile at the wrong positions",
        "step_plan",
        "tiles[:, 3] = runs[run, 3] + skipped",
        "tiles[:, 3] = runs[run, 3]",
        PLAN,
    ),
    Mutant("splits as few as of a long context", _SPLITS, "SPLIT_UNIT: Final = 128", "SPLIT_UNIT: Final = 4096", PLAN),
    Mutant(
        "longer splits that begin where shorter ones do",
        "split_kernels",
        "return ((split - (exponent << split_bits)) << exponent) * split_unit",
        "return split * split_unit",
        GROWING,
    ),
)
