"""Faults of a step: buffers and results that the host and the device share, graphs, the memory plan, and stale tables."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

UPLOADS = ("tests/llama_core/checkpoint/test_uploads.py", "late or waits")
MEMORY = (f"{TESTS}/test_step_memory.py", "three_percent")
KERNELS = (f"{TESTS}/test_fused.py", "what_torch_does_in_tritons_interpreter")
DEVICE = (f"{TESTS}/test_fused_device.py", "late")

_COPIES = """\
        self._device.copy(step.answer, results)
        if logprobs is not None:
            step.logprobs = self._logprobs[step.turn, : len(logprobs)]
            self._device.copy(step.logprobs, logprobs)
"""
_UPLOADS = "../../checkpoint/uploads"

STEP_MUTANTS = (
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
    Mutant(
        "a plan without the splits' results of a smaller batch",
        "step_memory",
        "        _body_bytes(*about, split_decodes, split_decodes),\n",
        "",
        MEMORY,
    ),
    # The tokens of a step.
    Mutant(
        "a token of another position",
        "token_kernels",
        "slot_tokens + slot * token_stride + position)\n    if",
        "slot_tokens + slot * token_stride + row)\n    if",
        KERNELS,
    ),
    Mutant(
        "a block of another slot",
        "token_kernels",
        "block_tables + slot * table_stride",
        "block_tables + row * table_stride",
        KERNELS,
    ),
    Mutant("a position without its place in the block", "token_kernels", " + position % block_size", "", KERNELS),
    Mutant("a failed sample as a token", "token_kernels", "tl.maximum(sample, 0)", "sample", KERNELS),
    Mutant(
        "samples beyond the first program",
        "token_kernels",
        "tl.program_id(0) * block + tl.arange",
        "tl.arange",
        KERNELS,
    ),
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
        "self._ops.store_samples(tokens, *places, self._slots.tokens, self._sampled[:bucket])",
        "self._ops.store_samples(tokens, *places, self._slots.tokens, tokens.clone())\n"
        "        self._results = torch.cat((self._results[:NUM_SUMS], tokens))",
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
    Mutant(
        "a group that is destroyed while its graphs exist",
        "backend",
        "before_leaving(_release_all_graphs)",
        "pass",
        (f"{TESTS}/test_fused_device.py", "leaves_releases"),
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
)
