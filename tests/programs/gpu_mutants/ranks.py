"""Faults of ranks: collectives, the times of layers, the one-shot all-reduce, and weights that arrive beside captures."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

RANKS = (f"{TESTS}/test_fused_device.py", "collectives")
TIMES = (f"{TESTS}/test_step_seconds.py", "rank")
SUMS = (f"{TESTS}/test_all_reduce.py", "interpreted")
NORMS = (f"{TESTS}/test_all_reduce.py", "both_norms")

_LOADING = "../rank_loading"

RANK_MUTANTS = (
    # Collectives.
    Mutant(
        "a broadcast that one rank leaves out",
        "sampling_head",
        "self._parallel.broadcast(tokens)\n        places",
        "tokens if self._parallel.rank else self._parallel.broadcast(tokens)\n        places",
        RANKS,
    ),
    Mutant(
        "collectives whose order depends on the rank",
        "model",
        "            return self._all_reduce.add_norm(hidden_states, partial, norm, eps, bias, turn)\n",
        "            self.parallel.broadcast(partial.clone()) if self.parallel.rank else None\n"
        "            x = self._all_reduce.add_norm(hidden_states, partial, norm, eps, bias, turn)\n"
        "            None if self.parallel.rank else self.parallel.broadcast(partial.clone())\n"
        "            return x\n",
        RANKS,
    ),
    # The times that travel with the samples.
    Mutant("the wait of one layer for that of all", "model", "waiting(len(self._layers))", "waiting()", TIMES),
    Mutant("a clock outside its graph", "step_clock", "self._ops.add_time(self._sums, index, -times)", "pass", TIMES),
    Mutant(
        "ranks that count each other's samples",
        "sampling_head",
        "if self._parallel.rank == 0 else",
        "if True else",
        TIMES,
    ),
    # The one-shot all-reduce.
    Mutant("one buffer for both turns", "all_reduce_kernels", "turn * memory.turn_bytes", "0", SUMS),
    Mutant("a sum before the peers have come", "all_reduce_kernels", ") & (polls > 0):", ") & (polls < 0):", SUMS),
    Mutant(
        "a wait that the signal of the meeting before ends",
        "all_reduce_kernels",
        "axis=0) < epoch) & (polls",
        "axis=0) < epoch - 1) & (polls",
        SUMS,
    ),
    Mutant(
        "a signal in a peer's place", "all_reduce_kernels", "(row * world + rank) * 8", "(row * world + peer) * 8", SUMS
    ),
    Mutant(
        "a sum in another order on another rank",
        "all_reduce_kernels",
        "theirs = _row_of(buffers, peer,",
        "theirs = _row_of(buffers, (peer + rank) % world,",
        SUMS,
    ),
    Mutant(
        "a self-test that ignores a peer's absence", "all_reduce", "equal and not memory.missed.item()", "equal", SUMS
    ),
    Mutant(
        "words of the switch's sums in another order",
        "all_reduce_kernels",
        "tl.join(words[0], words[2]), tl.join(words[1], words[3])",
        "tl.join(words[0], words[1]), tl.join(words[2], words[3])",
        SUMS,
    ),
    Mutant(
        "the switch's sum of another row",
        "all_reduce_kernels",
        "_switch_sum(tl.load(multicast) + place,",
        "_switch_sum(tl.load(multicast) + first_byte,",
        SUMS,
    ),
    Mutant(
        "a norm whose sum of squares has another order than the other's",
        "all_reduce_kernels",
        "num_warps=norm_warps(dim)",
        "num_warps=4",
        NORMS,
    ),
    # Weights that arrive while graphs are captured.
    Mutant(
        "a start that ends before its weights have arrived",
        "backend",
        "        loading.result()\n        self.start",
        "        self.start",
        (f"{TESTS}/test_fused_loading.py", "before_their_weights"),
    ),
    Mutant(
        "a rank that decides alone when it captures",
        _LOADING,
        "bool(smallest(parallel, can_have))",
        "can_have",
        (f"{TESTS}/test_fused_loading.py", "one_has_no_room"),
    ),
    Mutant(
        "weights that are read on after a failure",
        "backend",
        "            is_over.set()\n",
        "",
        (f"{TESTS}/test_fused_loading.py", "warm_up_that_fails"),
    ),
)
