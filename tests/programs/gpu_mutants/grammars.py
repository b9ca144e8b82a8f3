"""Faults of logit rules and of grammars' masks on their way to the device."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

DEVICE = (f"{TESTS}/test_fused_device.py", "late")
GRAMMARS = (f"{TESTS}/test_fused_grammars.py", "masks or thread")
LATE = (f"{TESTS}/test_fused_grammars.py", "late_tokens")

_RUNNER = "../runner"
_MASKS = "../grammars/masks"
_ROWS = "../grammars/rows"

GRAMMAR_MUTANTS = (
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
        _ROWS,
        "del self.slot.tokens[self.position - self.slot.first :]",
        "pass",
        (f"{TESTS}/test_grammar_masks.py", "refused_drafts"),
    ),
    Mutant("drafts that no grammar checks", _MASKS, "slot.drafts = draft.tokens", "pass", LATE),
    Mutant("an answer that new ranks do not know", _MASKS, "init.tokens[begin:])", "[])", LATE),
)
