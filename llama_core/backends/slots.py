"""The state of a rank's slots as arrays indexed by slot, so that a step gathers its rows without a loop."""

from collections.abc import Sequence as Seq

import torch

from llama_core.backends.logit_rules import LogitRules
from llama_core.backends.sampling import GREEDY_BELOW
from llama_core.backends.sampling_tensors import SlotSamplingArray
from llama_core.config import EngineConfig
from llama_core.scheduling.step import Draft, Grow, SlotInit


class SlotTable:
    """tokens int64 [slots, max_seq_len]: known tokens, of the prompt and sampled. block_tables int64 [slots,
    blocks_per_sequence]. rules: what else changes a slot's logits, None for most; rule_addresses int64 [slots], 0 for None.
    adapter_places int64 [slots]: where the slot's LoRA adapter is held, 0 for none.

    `spare` further slots, unknown to the driver, are for the backend.
    """

    def __init__(self, config: EngineConfig, device: torch.device, spare: int = 0) -> None:
        slots = config.max_batch_size + spare
        self.tokens = torch.zeros((slots, config.max_seq_len), dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((slots, config.blocks_per_sequence), dtype=torch.int64, device=device)
        self.sampling = SlotSamplingArray(slots, device)
        self.rules: list[LogitRules | None] = [None] * slots
        self.rule_addresses = torch.zeros(slots, dtype=torch.int64)
        self.adapter_places = torch.zeros(slots, dtype=torch.int64, device=device)
        self._vocab_size = config.vocab_size
        # Only Python reads the following lists. known_tokens are those that the driver sent, where prompt logprobs cover them,
        # never sampled tokens.
        self.num_blocks = [0] * slots
        self.known_tokens: list[Seq[int]] = [()] * slots
        self.top_logprobs = [-1] * slots
        self.prompt_logprobs = [False] * slots
        self.is_greedy = [True] * slots
        self.has_adapter = [False] * slots

    def admit(self, init: SlotInit) -> None:
        slot = init.slot
        self.tokens[slot, : len(init.tokens)] = torch.tensor(init.tokens)
        self.block_tables[slot, : len(init.blocks)] = torch.tensor(init.blocks)
        self.sampling.set(slot, init.params)
        self.adapter_places[slot] = init.adapter_place
        self._note(init)

    def _note(self, init: SlotInit) -> None:
        """Keep what Python reads."""
        slot, params = init.slot, init.params
        rules = self.rules[slot] = LogitRules(init, self._vocab_size) if params.edits_logits else None
        self.rule_addresses[slot] = 0 if rules is None else rules.address
        self.num_blocks[slot] = len(init.blocks)
        self.known_tokens[slot] = init.tokens if init.prompt_logprobs else ()
        self.top_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = init.prompt_logprobs
        self.has_adapter[slot] = init.adapter_place > 0
        self.is_greedy[slot] = params.temperature < GREEDY_BELOW

    def grow(self, grow: Grow) -> None:
        slot, block = grow
        self.block_tables[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1

    def propose(self, draft: Draft) -> None:
        slot, start, tokens = draft
        self.tokens[slot, start : start + len(tokens)] = torch.tensor(tokens)
