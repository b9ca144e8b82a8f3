"""What a rank remembers of its slots, as arrays indexed by slot, so that a step gathers its rows without a loop."""

import torch

from llama_core.config import EngineConfig
from llama_core.execution.sampling import GREEDY_BELOW
from llama_core.scheduling.step import Draft, Grow, SlotInit


class SlotTable:
    """tokens int64 [slots, max_seq_len]: known tokens, prompt and drawn. tables int64 [slots, blocks_per_sequence].

    `spare` more slots than the driver knows of are the backend's own.
    """

    def __init__(self, config: EngineConfig, device: torch.device, spare: int = 0) -> None:
        slots = config.max_batch_size + spare
        self.tokens = torch.zeros((slots, config.max_seq_len), dtype=torch.int64, device=device)
        self.tables = torch.zeros((slots, config.blocks_per_sequence), dtype=torch.int64, device=device)
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        # Read by Python only.
        self.num_blocks = [0] * slots
        self.num_known = [0] * slots  # tokens that the driver sent; it asks for no logprobs of drawn ones as a prompt's
        self.top_logprobs = [-1] * slots
        self.prompt_logprobs = [False] * slots
        self.is_greedy = [True] * slots

    def admit(self, init: SlotInit) -> None:
        slot = init.slot
        self.tokens[slot, : len(init.tokens)] = torch.tensor(init.tokens)
        self.tables[slot, : len(init.blocks)] = torch.tensor(init.blocks)
        self.temperature[slot] = init.temperature
        self.top_p[slot] = init.top_p
        self.top_k[slot] = init.top_k
        self.seeds[slot] = init.seed
        self.num_blocks[slot] = len(init.blocks)
        self.num_known[slot] = len(init.tokens)
        self.top_logprobs[slot] = init.top_logprobs
        self.prompt_logprobs[slot] = init.prompt_logprobs
        self.is_greedy[slot] = init.temperature < GREEDY_BELOW

    def grow(self, grow: Grow) -> None:
        slot, block = grow
        self.tables[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1

    def propose(self, draft: Draft) -> None:
        slot, start, tokens = draft
        self.tokens[slot, start : start + len(tokens)] = torch.tensor(tokens)
