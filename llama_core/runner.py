"""One rank's engine: remembers slots, runs a step's rows through the model, draws tokens. Decides nothing."""

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from llama_core.batch import PromptLogprobs, Row, SlotInit, StepInput, StepOutput
from llama_core.checkpoint import Checkpoint, Progress
from llama_core.config import EngineConfig, ModelConfig, read_params
from llama_core.errors import ConfigError, NonFiniteLogits
from llama_core.kv_cache import KVCache, PrefillRow, StepLayout
from llama_core.model import Transformer
from llama_core.parallel import Parallel
from llama_core.request import TokenLogprob
from llama_core.sampling import logprobs_of, sample

log = logging.getLogger(__name__)

CACHE_SHARE_OF_FREE = 0.5  # of the host memory that is free after load; the rest is for activations and everyone else
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
GPU_HEADROOM = 0.1  # of the device's memory, left free for activations and the allocator


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading took: seconds, bytes of weights on this rank, where they are, and as what."""

    seconds: float
    weight_bytes: int
    device: str
    dtype: str


class SlotTable:
    """What a rank remembers of its slots, as arrays indexed by slot, so that a step gathers its rows without a loop.

    tokens int64 [slots, max_seq_len]: known tokens, prompt and drawn. tables int64 [slots, blocks_per_sequence].
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        slots = config.max_batch_size
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

    def grow(self, slot: int, block: int) -> None:
        self.tables[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1


class ModelRunner:
    """`load`, then `allocate_cache`, then `warm_up`, then any number of `step`s. One thread at a time."""

    def __init__(self, config: EngineConfig, model: Transformer, parallel: Parallel, report: LoadReport) -> None:
        self.config = config
        self.model = model
        self.parallel = parallel
        self.report = report
        self._dtype = getattr(torch, report.dtype)
        self._slots = SlotTable(config, parallel.device)
        self._cache: KVCache | None = None

    @classmethod
    def load(
        cls, config: EngineConfig, parallel: Parallel, on_progress: Progress = lambda done, total: None
    ) -> "ModelRunner":
        """Check the checkpoint, then read this rank's share. Raises ConfigError or CheckpointError before it allocates."""
        begin = time.perf_counter()
        model_config = read_params(config.ckpt_dir, vocab_size=config.vocab_size)
        model_config.check_world_size(parallel.world_size)
        checkpoint = Checkpoint(config.ckpt_dir, model_config)
        if config.verify_checksums:
            checkpoint.verify_checksums(parallel.rank, parallel.world_size)
        dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        with torch.inference_mode():
            model = Transformer(model_config, parallel.world_size, config.max_seq_len, parallel.device)
            weights = checkpoint.load(parallel.rank, parallel.world_size, dtype, parallel.device, on_progress)
            model.load_state_dict(weights, strict=True, assign=True)
        model.eval()
        report = LoadReport(
            seconds=time.perf_counter() - begin,
            weight_bytes=sum(weight.nbytes for weight in weights.values()),
            device=_device_name(parallel.device),
            dtype=str(dtype).removeprefix("torch."),
        )
        log.info(
            "rank %d of %d: %.1f MB of weights loaded in %.2f s on %s as %s; max_seq_len %d, max_batch_size %d, vocabulary %d",
            parallel.rank,
            parallel.world_size,
            report.weight_bytes / 1e6,
            report.seconds,
            report.device,
            report.dtype,
            config.max_seq_len,
            config.max_batch_size,
            config.vocab_size,
        )
        return cls(config, model, parallel, report)

    @property
    def model_config(self) -> ModelConfig:
        return self.model.config

    def max_num_blocks(self) -> int:
        """Cache blocks that this rank's memory allows, at most what a full batch of full-length sequences needs.

        Raises ConfigError if not even one sequence of max_seq_len fits.
        """
        enough_for_one = self.config.blocks_per_sequence
        block_bytes = KVCache.bytes_per_block(*self._cache_shape())
        budget = self.config.kv_cache_bytes or max(0, _free_cache_bytes(self.parallel) - self._activation_bytes())
        num_blocks = min(enough_for_one * self.config.max_batch_size, budget // block_bytes)
        if num_blocks < enough_for_one:
            raise ConfigError(
                f"the cache of one sequence of max_seq_len {self.config.max_seq_len} needs "
                f"{enough_for_one * block_bytes} bytes on this rank, but there are {budget}: "
                "lower max_seq_len, or give kv_cache_bytes or more ranks",
                param="kv_cache_bytes",
            )
        return int(num_blocks)

    def allocate_cache(self, num_blocks: int) -> None:
        n_layers, block_size, n_kv_heads, head_dim, dtype = self._cache_shape()
        self._cache = KVCache(n_layers, num_blocks, block_size, n_kv_heads, head_dim, dtype, self.parallel.device)

    def warm_up(self) -> None:
        """Probe the model with a prompt and a decode. Raises NonFiniteLogits if it does not compute finite values."""
        length = min(8, self.config.max_seq_len - 1, self.config.max_step_tokens)
        tokens = [1 + i % (self.config.vocab_size - 1) for i in range(max(1, length))]
        blocks = list(range(-(-(len(tokens) + 1) // self.config.block_size)))
        init = SlotInit(slot=0, tokens=tokens, blocks=blocks, temperature=0.0, top_p=1.0, top_k=0, seed=0)
        prefill = Row(0, 0, len(tokens), True)
        outputs = [self.step(StepInput(epoch=0, step=0, rows=[prefill], admit=[init]))]
        if len(tokens) + 1 < self.config.max_seq_len:
            outputs.append(self.step(StepInput(epoch=0, step=0, rows=[Row(0, len(tokens), 1, True)])))
        if any(output.non_finite for output in outputs):
            raise NonFiniteLogits(
                f"{self.config.ckpt_dir}: the model computes values that are not finite (NaN or infinity)"
            )

    @torch.inference_mode()
    def step(self, batch: StepInput) -> StepOutput:
        """Run one step. Every rank of the group is given the same `batch`, in the same order; each returns the same tokens."""
        assert self._cache is not None, "allocate_cache comes first"
        begin = time.perf_counter()
        for init in batch.admit:
            self._slots.admit(init)
        for slot, block in batch.grow:
            self._slots.grow(slot, block)
        for slot, start, drafts in batch.drafts:
            self._slots.tokens[slot, start : start + len(drafts)] = torch.tensor(drafts)
        rows = batch.rows
        tokens, layout, ends = self._lay_out(rows)
        states = self.model(tokens, self._cache, layout)
        prompt_logprobs = self._prompt_logprobs(rows, states, ends)
        # A row draws from its last 1 + num_drafts states; it nearly always has one.
        draws = [
            (end - back, row.slot, row.start + row.length + 1 - back)
            for row, end in zip(rows, ends, strict=True)
            if row.samples
            for back in range(row.num_drafts + 1, 0, -1)
        ]
        drawn, logprobs, non_finite = list[int](), list[TokenLogprob | None](), list[int]()
        if draws:
            last, index, positions = torch.tensor(draws, device=self.parallel.device).unbind(1)
            logits = self.model.logits(states[last])
            drawn, non_finite = self._draw(index, positions, logits)
            logprobs = self._logprobs([slot for _, slot, _ in draws], logits, drawn)
        return StepOutput(
            epoch=batch.epoch,
            step=batch.step,
            tokens=drawn,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            non_finite=non_finite,
            elapsed_ms=(time.perf_counter() - begin) * 1e3,
            device_memory_bytes=torch.cuda.memory_allocated() if self.parallel.device.type == "cuda" else 0,
        )

    def _lay_out(self, rows: list[Row]) -> tuple[torch.Tensor, StepLayout, list[int]]:
        """The step's tokens int64 [T], where they go, and the end of each row in T."""
        slots, device, block_size = self._slots, self.parallel.device, self.config.block_size
        ends: list[int] = []
        total = 0
        for row in rows:
            total += row.length
            ends.append(total)
        columns = torch.tensor([[row.slot, row.start, row.length] for row in rows], device=device)
        slot_of_row, start_of_row, count_of_row = columns.unbind(1)
        row_of_token = torch.repeat_interleave(torch.arange(len(rows), device=device), count_of_row, output_size=total)
        offset = torch.arange(total, device=device) - (count_of_row.cumsum(0) - count_of_row)[row_of_token]
        positions = start_of_row[row_of_token] + offset
        slot_of_token = slot_of_row[row_of_token]
        blocks = slots.tables[slot_of_token, positions // block_size]

        decodes = [i for i, row in enumerate(rows) if row.length == 1]
        longest = max((rows[i].start + 1 for i in decodes), default=0)
        decode_rows = torch.tensor(decodes, dtype=torch.int64, device=device)
        prefills = []
        for i, row in enumerate(rows):
            if row.length > 1:
                seen = torch.arange(row.start + row.length, device=device)
                keys = slots.tables[row.slot, seen // block_size] * block_size + seen % block_size
                prefills.append(PrefillRow(ends[i] - row.length, ends[i], row.start, keys))
        layout = StepLayout(
            positions=positions,
            write=blocks * block_size + positions % block_size,
            decode_index=torch.tensor([ends[i] - 1 for i in decodes], dtype=torch.int64, device=device),
            decode_tables=slots.tables[slot_of_row[decode_rows], : -(-longest // block_size)],
            decode_lengths=start_of_row[decode_rows] + 1,
            prefills=prefills,
        )
        return slots.tokens[slot_of_token, positions], layout, ends

    def _draw(self, index: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """Draw the tokens at `positions` of the slots `index`, both int64 [D], from logits [D, vocab], and remember them as
        input. Returns tokens, and the draws whose logits are not finite."""
        slots = self._slots
        finite = logits.sum(-1).isfinite()
        if self.parallel.rank == 0:
            # A row that is not finite draws from zeros: its token means nothing, but it must be a token.
            tokens = sample(
                torch.where(finite[:, None], logits, torch.zeros_like(logits)),
                slots.temperature[index],
                slots.top_p[index],
                slots.top_k[index],
                slots.seeds[index],
                positions,
            )
        else:
            tokens = torch.empty_like(index)
        # Ranks may differ in the last bit of a logit (other CPUs, other libraries): one draws for all.
        self.parallel.broadcast(tokens)
        slots.tokens[index, positions] = tokens
        return tokens.tolist(), [i for i, ok in enumerate(finite.tolist()) if not ok]

    def _logprobs(self, slots: list[int], logits: torch.Tensor, tokens: list[int]) -> list[TokenLogprob | None]:
        """One entry a draw, None where its slot did not ask; nothing at all where no slot did."""
        wanted = [i for i, slot in enumerate(slots) if self._slots.top_logprobs[slot] >= 0]
        if not wanted:
            return []
        num_top = [self._slots.top_logprobs[slots[i]] for i in wanted]
        values = _token_logprobs(logits[wanted], [tokens[i] for i in wanted], num_top)
        result: list[TokenLogprob | None] = [None] * len(slots)
        for i, value in zip(wanted, values, strict=True):
            result[i] = value
        return result

    def _prompt_logprobs(self, rows: list[Row], states: torch.Tensor, ends: list[int]) -> list[PromptLogprobs]:
        """Logprobs of the known tokens that follow each position of the rows whose slots ask for them."""
        result = []
        for i, row in enumerate(rows):
            known = min(row.start + row.length + 1, self._slots.num_known[row.slot])  # targets are start + 1 .. known
            count = known - row.start - 1
            if not self._slots.prompt_logprobs[row.slot] or count <= 0:
                continue
            begin = ends[i] - row.length
            logits = self.model.logits(states[begin : begin + count])
            targets = self._slots.tokens[row.slot, row.start + 1 : known].tolist()
            num_top = [max(0, self._slots.top_logprobs[row.slot])] * count
            result.append(PromptLogprobs(i, row.start, _token_logprobs(logits, targets, num_top)))
        return result

    def _activation_bytes(self) -> int:
        """The largest step's temporary memory: what decoding gathers (keys twice, once to transpose them, and values), scores
        and weights in float32, and logits three times (as computed, in float32, sorted)."""
        _, _, n_kv_heads, head_dim, dtype = self._cache_shape()
        rows, config = self.config.max_batch_size, self.model_config
        keys = rows * self.config.max_seq_len
        gathered = 3 * keys * n_kv_heads * head_dim * dtype.itemsize
        scores = 2 * keys * config.n_heads // self.parallel.world_size * 4
        return gathered + scores + self.config.max_step_draws * config.vocab_size * (dtype.itemsize + 8)

    def _cache_shape(self) -> tuple[int, int, int, int, torch.dtype]:
        """n_layers, block_size, key/value heads of this rank, head_dim, dtype."""
        config = self.model_config
        heads = config.n_kv_heads // self.parallel.world_size
        return config.n_layers, self.config.block_size, heads, config.head_dim, self._dtype


def _token_logprobs(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprob]:
    chosen, values, ids = logprobs_of(logits, torch.tensor(tokens, device=logits.device), max(num_top))
    rows = zip(chosen.tolist(), values.tolist(), ids.tolist(), num_top, strict=True)
    return [TokenLogprob(logprob, list(zip(top_ids[:n], top[:n], strict=True))) for logprob, top, top_ids, n in rows]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def _free_cache_bytes(parallel: Parallel) -> int:
    """Bytes that one rank may take for its cache, when nobody said."""
    if parallel.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(parallel.device)
        return int(free - total * GPU_HEADROOM)
    return int(_available_host_bytes() * CACHE_SHARE_OF_FREE) // parallel.world_size


def _available_host_bytes() -> int:
    """Memory that this process could still get: the machine's, or what its container's limit leaves (cgroup v2, v1)."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = next(
            int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(available, 0)
