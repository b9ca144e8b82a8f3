"""Breaks the fused backend in one place at a time and expects its tests to fail: `python -m tests.programs.gpu_mutants`.

Each mutant is a copy of the packages with one text replaced. Exit status 1 if the tests of a mutant pass.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FUSED = "llama_core/execution/fused"
TESTS = "tests/llama_core/execution"
# Ranks that wait for a collective which never comes are a failure too.
LIMIT_S = 120.0

UPLOADS = ("tests/llama_core/checkpoint/test_uploads.py", "late or waits")
MEMORY = (f"{TESTS}/test_step_memory.py", "three_percent")
DEVICE = (f"{TESTS}/test_fused_device.py", "late")
GRAMMARS = (f"{TESTS}/test_fused_grammars.py", "masks or thread")
LATE = (f"{TESTS}/test_fused_grammars.py", "late_tokens")
RANKS = (f"{TESTS}/test_fused_device.py", "collectives")
EARLY = (f"{TESTS}/test_early_launch.py", "waits")
TIMES = (f"{TESTS}/test_step_seconds.py", "rank")
ATTENTION = (f"{TESTS}/test_fused_attention.py", "interpreter")
BORDERS = (f"{TESTS}/test_fused_attention.py", "see_other_splits")
SHARES = (f"{TESTS}/test_fused_attention.py", "share_its_positions")
GROWING = (f"{TESTS}/test_fused_attention.py", "splits_grow")
PLAN = (f"{TESTS}/test_fused_attention.py", "plan or splits")
KEYS = (f"{TESTS}/test_compile_keys.py", "int8 or bfloat16")
SUMS = (f"{TESTS}/test_all_reduce.py", "interpreted")
NORMS = (f"{TESTS}/test_all_reduce.py", "both_norms")
PRODUCTS = (f"{TESTS}/test_fused_products.py", "tile_and_split")
CHOICE = (f"{TESTS}/test_fused_products.py", "few_rows")
DRAWS, LIMITS, EDITS, LOGPROBS, ZEROS, REUSE = (
    (f"{TESTS}/test_fused_sampling.py", f"interpreter and {check}")
    for check in ("draws", "limits", "edits", "logprobs", "zeros", "reuse")
)
LARGE = (f"{TESTS}/test_fused_sampling.py", "interpreter and large", "--full")


_COPIES = """\
        self._device.copy(step.answer, results)
        if logprobs is not None:
            step.logprobs = self._logprobs[step.turn, : len(logprobs)]
            self._device.copy(step.logprobs, logprobs)
"""
_UPLOADS = "../../checkpoint/uploads"
_SPLITS = "../../step_time/attention_splits"
_RUNNER = "../runner"
_LOADING = "../rank_loading"
_MASKS = "../grammars/masks"


class Mutant(NamedTuple):
    """tests: a file, an expression of its tests' names, and further options of pytest."""

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # Races between the host and the device.
    Mutant("two buffers in turn, with four steps in flight", "backend", "_TURNS = 4", "_TURNS = 2", DEVICE),
    Mutant("inputs of all steps in one buffer", "step_buffers", "self._sent[turn]", "self._sent[0]", DEVICE),
    Mutant("results of all steps in one buffer", "backend", "self._answers[step.turn]", "self._answers[0]", DEVICE),
    Mutant("a result that is read without a wait", "backend", "step.copied.wait()", "pass", DEVICE),
    Mutant(
        "an event before the copy that it stands for",
        "backend",
        _COPIES + "        step.copied = self._device.record()\n",
        "        step.copied = self._device.record()\n" + _COPIES,
        DEVICE,
    ),
    Mutant("a buffer of weights that is filled while it travels", _UPLOADS, "earlier.wait()", "pass", UPLOADS),
    Mutant(
        "a buffer of weights whose slices overlap",
        _UPLOADS,
        "self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT",
        "self._used += num_bytes // 2 // _ALIGNMENT * _ALIGNMENT",
        UPLOADS,
    ),
    # The memory plan.
    Mutant("a plan without steps that have no graph", "step_memory", "return pool + eager", "return pool", MEMORY),
    Mutant("a plan without the gated product of a layer", "step_memory", "projected + hidden\n", "projected\n", MEMORY),
    # Graphs.
    Mutant(
        "a graph whose output is not copied out of its memory",
        "backend",
        "self._hidden_states[: shape.tokens] = self.model",
        "self._hidden_states = self._head._hidden_states = self.model",
        DEVICE,
    ),
    Mutant(
        "samples in a graph's own memory",
        "sampling_head",
        "self._sampled[:bucket] = tokens",
        "self._results = torch.cat((self._results[:NUM_SUMS], tokens))",
        DEVICE,
    ),
    Mutant(
        "an input buffer that moves between replays",
        "step_buffers",
        "        sent = self._sent[turn]\n",
        "        sent = self._sent[turn]\n        self._received = torch.zeros_like(self._received)\n",
        DEVICE,
    ),
    Mutant(
        "a wait for the host in a captured step",
        "sampling_head",
        "self._sampler.sample(logits, samples, mode)\n",
        "self._sampler.sample(logits, samples, mode)\n        assert bool((tokens < 10**9).all())\n",
        DEVICE,
    ),
    # Stale tables.
    Mutant(
        "tiles of the step before behind those of this one",
        "step_plan",
        "to.decodes[decodes:, 1] = 0",
        "pass",
        DEVICE,
    ),
    Mutant("a buffer that is taken for another one's", "step_buffers", "last == self._last", "True", DEVICE),
    Mutant("changes of slots that are not applied", "backend", "if changes:", "if False:", DEVICE),
    Mutant("changes that are sent again and again", "device_slots", "                writes.clear()\n", "", DEVICE),
    Mutant(
        "a block table that keeps the blocks of the sequence before",
        "device_slots",
        "self._write(_BLOCKS, init.slot, 0, init.blocks)",
        "pass",
        DEVICE,
    ),
    Mutant(
        "a block table that does not grow",
        "device_slots",
        "self._write(_BLOCKS, slot, self.num_blocks[slot], [block])",
        "pass",
        DEVICE,
    ),
    Mutant(
        "sampling parameters of the sequence before",
        "device_slots",
        "self._write(_SAMPLING, init.slot, 0, words_of(init.params))",
        "pass",
        DEVICE,
    ),
    Mutant(
        "padding that writes to a sequence's cache",
        "step_plan",
        "        to.tokens[0, tokens:] = spare_slot\n        to.tokens[1, tokens:] = 0\n",
        "        to.tokens[0, tokens:] = 0\n        to.tokens[1, tokens:] = 150\n",
        DEVICE,
    ),
    # Collectives.
    Mutant(
        "a broadcast that one rank leaves out",
        "sampling_head",
        "self._parallel.broadcast(tokens)\n        self._slots",
        "tokens if self._parallel.rank else self._parallel.broadcast(tokens)\n        self._slots",
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
    # Masks and indices of the attention kernel.
    Mutant(
        "a query that sees the next position",
        "attention_kernels",
        "(position[None, :] < length[:, None])",
        "(position[None, :] <= length[:, None])",
        ATTENTION,
    ),
    Mutant(
        "a window without its first position",
        "attention_kernels",
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
        "attention_kernels",
        "begin = _split_of(_first_seen(length, window), split_unit, split_bits)",
        "begin = _split_of(_first_seen(length, window), split_unit, split_bits) + 1",
        ATTENTION,
    ),
    Mutant(
        "a split behind the last that has a weight",
        "attention_kernels",
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
        "stop = tl.minimum(_split_begin(next_split, split_unit, split_bits), end)",
        "stop = tl.minimum(_split_begin(split + 1, split_unit, split_bits), end)",
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
        " & (length > _split_begin(split, split_unit, split_bits))",
        "",
        BORDERS,
    ),
    Mutant(
        "a share of positions that leaves out a split at its begin",
        "attention_kernels",
        "split = _split_of(own - 1, split_unit, split_bits) + 1",
        "split = _split_of(own, split_unit, split_bits) + 1",
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
        "a kernel that begins early and does not wait",
        "kernels",
        "    begin_early(is_early)\n    token = tl.program_id(0)",
        "    token = tl.program_id(0)",
        EARLY,
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
        "token = tl.load(about + 4) + index",
        "token = tl.load(about + 4) + index // 2",
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
        "a tile at the wrong positions",
        "step_plan",
        "tiles[:, 3] = runs[run, 3] + skipped",
        "tiles[:, 3] = runs[run, 3]",
        PLAN,
    ),
    Mutant("splits as few as of a long context", _SPLITS, "SPLIT_UNIT: Final = 128", "SPLIT_UNIT: Final = 4096", PLAN),
    Mutant(
        "longer splits that begin where shorter ones do",
        "attention_kernels",
        "return ((split - (exponent << split_bits)) << exponent) * split_unit",
        "return split * split_unit",
        GROWING,
    ),
    Mutant(
        "a group that is destroyed while its graphs exist",
        "backend",
        "before_leaving(_release_all_graphs)",
        "pass",
        (f"{TESTS}/test_fused_device.py", "leaves_releases"),
    ),
    # Compilations while requests wait.
    Mutant("a step whose tiles are aligned to 8 bytes", "step_plan", "return count + count % 2", "return count", KEYS),
    Mutant(
        "a product that is compiled for a number of rows",
        "../weight_formats/kernels",
        '@triton.jit(do_not_specialize=["rows"])',
        "@triton.jit",
        KEYS,
    ),
    # Rules and masks on their way to the device.
    Mutant("rules of the sequence before", "device_slots", "elif had_rules:", "elif False:", DEVICE),
    Mutant("a mask that is read before it is computed", "mask_buffers", "masks.wait()", "pass", DEVICE),
    Mutant("masks of all steps in one buffer", "mask_buffers", "self._sent[turn]", "self._sent[0]", DEVICE),
    Mutant("masks of the step before", "mask_buffers", "indices.fill(-1)", "pass", DEVICE),
    Mutant("logprobs of all steps in one buffer", "backend", "self._logprobs[step.turn,", "self._logprobs[0,", DEVICE),
    Mutant(
        "changes beyond the buffer that are read before they are sent",
        "step_buffers",
        "            self._device.copy(received, sent.large)\n",
        "            received.copy_(sent.large * 0)\n",
        (f"{TESTS}/test_fused_device.py", "beyond_the_buffer"),
    ),
    # Grammars, whose thread follows late.
    Mutant(
        "masks that a step waits for when it starts",
        "backend",
        "        if masks is None:\n            self.queue_samples()\n",
        "        self.queue_samples()\n",
        GRAMMARS,
    ),
    Mutant(
        "layers of a step before the samples of the step before",
        "backend",
        "        self.queue_samples()\n        plan = plan_of",
        "        plan = plan_of",
        DEVICE,
    ),
    Mutant(
        "masks that begin before the samples they follow",
        _RUNNER,
        "            self.backend.queue_samples()\n",
        "",
        GRAMMARS,
    ),
    Mutant("masks that no poll notices", "backend", "step.masks.is_done", "False", GRAMMARS),
    Mutant("a result that two threads read", _RUNNER, "if self._sampled is None:", "if True:", GRAMMARS),
    Mutant("tokens that no grammar follows", _MASKS, "self._latest = masks, sampled", "pass", LATE),
    Mutant(
        "samples behind a refused draft that stay",
        _MASKS,
        "del self.slot.tokens[self.position - self.slot.first :]",
        "pass",
        (f"{TESTS}/test_grammar_masks.py", "refused_drafts"),
    ),
    Mutant("drafts that no grammar checks", _MASKS, "slot.drafts = draft.tokens", "pass", LATE),
    Mutant("an answer that new ranks do not know", _MASKS, "init.tokens[begin:] if grammar else []", "[]", LATE),
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
        (f"{TESTS}/test_fused_device.py", "before_their_weights"),
    ),
    Mutant(
        "a rank that decides alone when it captures",
        _LOADING,
        "bool(smallest(parallel, can_have))",
        "can_have",
        (f"{TESTS}/test_fused_device.py", "one_has_no_room"),
    ),
    Mutant(
        "weights that are read on after a failure",
        "backend",
        "            is_over.set()\n",
        "",
        (f"{TESTS}/test_fused_device.py", "warm_up_that_fails"),
    ),
    # Products with epilogues.
    Mutant(
        "a gate in the place of its up",
        "product_kernels",
        "of_hidden + index % 2 * hidden,",
        "of_hidden + (1 - index % 2) * hidden,",
        PRODUCTS,
    ),
    Mutant(
        "sums of gate and up that are not rounded",
        "product_kernels",
        "tl.reshape(acc.to(out.dtype.element_ty), ",
        "tl.reshape(acc, ",
        PRODUCTS,
    ),
    Mutant(
        "rows beyond the step's that are written",
        "product_kernels",
        "    inside = (row < rows)[:, None] & (output < outputs)[None, :]\n    target",
        "    inside = (row < rows + 1)[:, None] & (output < outputs)[None, :]\n    target",
        PRODUCTS,
    ),
    Mutant(
        "sums of a split over those of another",
        "product_kernels",
        "tl.program_id(2).to(tl.int64) * rows * outputs + target",
        "target",
        PRODUCTS,
    ),
    Mutant(
        "inputs that two splits share",
        "product_kernels",
        "tl.minimum(begin + split, width)",
        "tl.minimum(begin + split + 1, width)",
        PRODUCTS,
    ),
    Mutant("the last split's sums that are not added", "kernels", "(1, num_splits)", "(1, num_splits - 1)", PRODUCTS),
    Mutant(
        "a bias that is lost with the splits",
        "kernels",
        "partial, weight, eps, bias, num_splits",
        "partial, weight, eps, None, num_splits",
        PRODUCTS,
    ),
    Mutant("the scale of the group before", "../weight_formats/tile_kernels", "first // width +", "0 +", PRODUCTS),
    Mutant("a fused product where bits are promised", "kernels", "never if batch_invariant else ", "", PRODUCTS),
    Mutant("fused products of more rows", "product_choice", "rows <= MOST_ROWS and ", "", CHOICE),
    # The draw.
    Mutant(
        "a limit that ends a bin early",
        "nucleus_kernels",
        "bin = tl.sum((reached <= target)",
        "bin = tl.sum((reached < target)",
        LIMITS,
    ),
    Mutant("a bisection that leaves out bits", "nucleus_kernels", "bit = bit >> 1", "bit = bit >> 2", DRAWS),
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
        DRAWS,
    ),
    Mutant(
        "a list longer than its first part",
        "nucleus_kernels",
        "for first in range(list_tile, count, list_tile):",
        "for first in range(list_tile, 0, list_tile):",
        LARGE,
    ),
    Mutant("a token that min_p keeps", "sampling_kernels", "(p >= tl.load(min_ps", "(p > tl.load(min_ps", DRAWS),
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


def is_caught(mutant: Mutant, folder: Path) -> bool:
    """Whether the mutant's tests fail. Raises ValueError if its text does not occur once."""
    path = folder / FUSED / f"{mutant.file}.py"
    text = path.read_text()
    if mutant.old not in text:
        raise ValueError(f"{path.name} has no {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        file, words, *further = mutant.tests
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file, "-k", words, *further]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT_S) == 1
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return True
    finally:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="only mutants whose description has one of these")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if not options.words or any(word in each.fault for word in options.words)]
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
        for part in ("llama_core", "cluster", "deployments", "cli", "tests", "benchmarks", "demo"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for mutant in chosen:
            begin = time.perf_counter()
            caught = is_caught(mutant, folder)
            missed += [] if caught else [mutant]
            print(
                f"{'caught' if caught else 'MISSED'}  {time.perf_counter() - begin:5.1f} s  {mutant.fault}", flush=True
            )
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
