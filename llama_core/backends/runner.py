"""One rank's engine: holds the slots, lets a backend compute and sample the rows of a step, and returns the output."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from llama_core.backends.backend import LOGITS_AT_A_TIME, Sampled
from llama_core.backends.memory_budget import LEAST_CONTEXT, free_cache_bytes, longest_context
from llama_core.backends.parallel import Parallel, smallest
from llama_core.backends.pooling import Pooling
from llama_core.backends.rank_loading import LoadedRank, load_rank
from llama_core.backends.sampling import token_logprobs
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError, LlamaError, NonFiniteLogits
from llama_core.files.source import CheckpointSource
from llama_core.grammar.masks import SlotGrammars
from llama_core.model.share import RankShare
from llama_core.scheduling.request import TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.sliding_window import SlidingWindow
from llama_core.scheduling.step import AdapterLoad, Pending, PromptLogprobs, Row, SlotInit, StepInput, StepOutput
from llama_core.weights.adapter import read_adapter, unreadable
from llama_core.weights.loader import Progress

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

_STEPS_A_COUNT = 64
CONTRADICTION = "no token is allowed here: the rules of the request contradict each other"


def _read_once(read: Callable[[], Sampled]) -> Callable[[], Sampled]:
    """For two threads: the first one reads the result from the backend; the other waits and gets the same."""
    lock, kept = threading.Lock(), cache(read)

    def locked() -> Sampled:
        with lock:
            return kept()

    return locked


class ModelRunner:
    """`load`, then `allocate_cache`, then `warm_up`, then any number of `step`s. One thread at a time."""

    def __init__(self, loaded: LoadedRank, vocabulary: "Callable[[], LLTokenizer] | None" = None) -> None:
        """vocabulary: as `load` has it."""
        self.config = loaded.config
        self.model_config = loaded.model_config
        self.parallel = loaded.parallel
        self.backend = loaded.backend
        self.report = loaded.report
        self._replaces_ranks = loaded.former_blocks > 0
        self._slots = loaded.slots
        self._grammars = (
            SlotGrammars(vocabulary, self.config.vocab_size, len(self._slots.rules)) if self.parallel.samples else None
        )
        self._pooling = Pooling()
        self._adapters: dict[int, str] = {}  # digests, by place
        self._ended = 0.0  # when the latest result was read
        self._num_results = self._device_bytes = 0

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        parallel: Parallel,
        on_progress: Progress = lambda done, total: None,
        source: CheckpointSource | None = None,
        vocabulary: "Callable[[], LLTokenizer] | None" = None,
        former_blocks: int = 0,
    ) -> "ModelRunner":
        """As `load_rank`. vocabulary: for grammars, called on rank 0 in a thread; None: no request may have one."""
        return cls(load_rank(config, parallel, on_progress, source, former_blocks), vocabulary)

    def prepare_grammars(self) -> None:
        """Load the vocabulary for grammars in the background, and defer samples from now on rather than let a step wait for a
        slow grammar. For ranks that take their steps from a driver, which reads rank 0's output."""
        if self._grammars is not None:
            self._grammars.prepare()

    def seconds_waited(self) -> float | None:
        """Seconds waited for the other ranks, and on CPUs for masks of grammars, in all steps so far; None where the backend
        does not measure it. From any thread."""
        return self.backend.seconds_waited

    def seconds_sampled(self) -> float | None:
        """Seconds spent in sampling in all steps so far; None where the backend does not measure it. From any thread."""
        return self.backend.seconds_sampled

    def max_num_blocks(self) -> int:
        """Cache blocks that this rank's memory allows, at most what a full batch of full-length sequences needs.

        Where the ranks chose max_seq_len, lowers it once more if memory became less than was planned; then every rank must
        call this. Raises ConfigError if not even one sequence of max_seq_len fits.
        """
        block_bytes = self.backend.cache_block_bytes
        free = 0 if self.config.kv_cache_bytes else free_cache_bytes(self.parallel)

        def cache_bytes(max_seq_len: int) -> int:
            return self.config.kv_cache_bytes or max(0, free - self.backend.unallocated_bytes(max_seq_len))

        if self.config.lowers_max_seq_len:
            self._lower_context(longest_context(self.config, self.model_config, block_bytes, cache_bytes))
        config = self.config
        window = SlidingWindow.of(self.model_config.longest_window, config.block_size, config.max_step_tokens)
        enough_for_one = window.num_held(config.max_seq_len)
        budget = cache_bytes(config.max_seq_len)
        # The scheduler holds one more block for each sequence in reserve. Without it, the last sequence would wait for another
        # one to end.
        num_blocks = min((enough_for_one + 1) * self.config.max_batch_size, budget // block_bytes)
        if num_blocks < enough_for_one:
            raise ConfigError(
                f"the cache of one sequence of max_seq_len {self.config.max_seq_len} needs "
                f"{enough_for_one * block_bytes} bytes on this rank, but there are {budget}: "
                "lower max_seq_len, or give kv_cache_bytes or more ranks",
                param="kv_cache_bytes",
            )
        return int(num_blocks)

    def _lower_context(self, own_longest: int) -> None:
        wanted = self.config.max_seq_len
        longest = max(min(LEAST_CONTEXT, wanted), smallest(self.parallel, own_longest))
        if longest < wanted:
            log.warning("memory became less during loading: max_seq_len is %d instead of %d", longest, wanted)
            self.config = replace(self.config, max_seq_len=longest)
            self.report = replace(self.report, max_seq_len=longest)

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate the cache and warm the device up. Raises ConfigError if the device's memory is less than was planned."""
        try:
            self.backend.allocate_cache(num_blocks)
        except torch.OutOfMemoryError as error:
            if self._replaces_ranks:
                raise  # the configuration was right for the ranks before: this rank's device is at fault
            raise ConfigError(
                f"the device's memory does not hold {num_blocks} blocks of cache "
                f"({num_blocks * self.backend.cache_block_bytes} bytes) beside the weights and the working memory of steps "
                f"({str(error).splitlines()[0]}): lower kv_cache_bytes, max_batch_size or max_step_tokens, or give more ranks",
                param="kv_cache_bytes",
            ) from None
        log.info(
            "rank %d of %d: memory plan: %.1f MB weights, %.1f MB cache (%d blocks of %d tokens), %.1f MB working memory",
            self.parallel.rank,
            self.parallel.world_size,
            self.backend.weight_bytes / 1e6,
            num_blocks * self.backend.cache_block_bytes / 1e6,
            num_blocks,
            self.config.block_size,
            self.backend.working_bytes / 1e6,
        )

    def warm_up(self) -> None:
        """Probe the model with a prompt and a decode. Raises NonFiniteLogits if it does not compute finite values."""
        length = min(8, self.config.max_seq_len - 1, self.config.max_step_tokens)
        tokens = [1 + i % (self.config.vocab_size - 1) for i in range(max(1, length))]
        blocks = list(range(-(-(len(tokens) + 1) // self.config.block_size)))
        init = SlotInit(slot=0, tokens=tokens, blocks=blocks, params=SamplingParams(temperature=0.0))
        prefill = Row(0, 0, len(tokens), True)
        outputs = [self.step(StepInput(epoch=0, step=0, rows=[prefill], admit=[init]))]
        if len(tokens) + 1 < self.config.max_seq_len:
            outputs.append(self.step(StepInput(epoch=0, step=0, rows=[Row(0, len(tokens), 1, True)])))
        if any(output.non_finite for output in outputs):
            raise NonFiniteLogits(
                f"{self.config.ckpt_dir}: the model computes values that are not finite (NaN or infinity)"
            )

    def step(self, batch: StepInput) -> StepOutput:
        """Run one step. Every rank of the group is given the same `batch`, in the same order; each returns the same tokens."""
        return self.start(batch).result()

    @torch.inference_mode()
    def start(self, batch: StepInput) -> Pending[StepOutput]:
        """Like `step`, but does not wait for an asynchronous device. The caller may start one more step before it calls
        `result`."""
        begin = time.perf_counter()
        slots, grammars = self._slots, self._grammars
        for load in batch.adapters:
            self._load_adapter(load)
        for init in batch.admit:
            slots.admit(init)
            self._pooling.admit(init)
            if grammars is not None:
                grammars.admit(init)
        for grow in batch.grow:
            slots.grow(grow)
        for draft in batch.drafts:
            slots.propose(draft)
            if grammars is not None:
                grammars.propose(draft)
        rows = batch.rows
        wanted = any(row.samples and slots.top_logprobs[row.slot] >= 0 for row in rows)
        # The next step may give slots to other sequences before this step's result is read.
        num_top = self._num_top(rows) if wanted else []
        wanted_of_prompts = any(slots.prompt_logprobs[row.slot] for row in rows)
        pooled = self._pooling.rows(rows)
        masks = None
        if grammars is not None and grammars.has_grammars:
            # The grammars' thread reads what the step before samples.
            self.backend.queue_samples()
            masks = grammars.begin(rows)
        pending = self.backend.start(rows, keep_logits=wanted, masks=masks)
        read = pending.result
        if grammars is not None and masks is not None:
            read = _read_once(pending.result)
            grammars.follow(masks, lambda: read().tokens)

        @torch.inference_mode()
        def result() -> StepOutput:
            sampled = read()
            if masks is not None:
                masks.wait()
            reasons = masks.reasons if masks is not None else {}
            deferred = masks.deferred if masks is not None else []
            output = StepOutput(
                epoch=batch.epoch,
                step=batch.step,
                tokens=sampled.tokens,
                logprobs=self._logprobs(sampled, num_top) if wanted else [],
                prompt_logprobs=self._prompt_logprobs(rows) if wanted_of_prompts else [],
                non_finite=sampled.non_finite,
                refused=[(i, reasons.get(i, CONTRADICTION)) for i in sampled.refused if i not in deferred],
                forced=masks.forced if masks is not None else [],
                deferred=deferred,
                # The previous step may have ended after this step was started.
                elapsed_ms=(time.perf_counter() - max(begin, self._ended)) * 1e3,
                mask_wait_ms=None if sampled.mask_wait_s is None else sampled.mask_wait_s * 1e3,
                device_memory_bytes=self._allocated_bytes(),
                embeddings=self._pooling.pool(pooled, self.backend.hidden_states_of_tokens) if pooled else [],
            )
            self._ended = time.perf_counter()
            return output

        # The backend keeps the hidden states of the latest step only.
        if pending.is_done or wanted_of_prompts or pooled:
            return Pending.done(result())
        return Pending(result, pending.is_ready)

    def _load_adapter(self, load: AdapterLoad) -> None:
        """Rows of the adapter get NaN where its files are not those that were checked (`unreadable`)."""
        place, digest, folder = load
        if self._adapters.get(place) == digest:
            return
        begin = time.perf_counter()
        self._adapters.pop(place, None)
        share = RankShare.of(self.model_config, self.parallel.rank, self.parallel.world_size)
        # On a busy machine, the barrier of OpenMP's threads after each small matrix takes longer than the copy.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            try:
                pairs = read_adapter(folder, digest, self.model_config, share, self.config.max_lora_rank)
            except Exception as error:  # no file of an adapter may end the rank
                words = error.message if isinstance(error, LlamaError) else f"{folder}: {type(error).__name__}"
                log.error("requests with this adapter fail: %s", words)
                pairs, digest = unreadable(self.model_config, share), ""
            self.backend.load_adapter(place, pairs)
        finally:
            torch.set_num_threads(num_threads)
        self._adapters[place] = digest
        log.info("adapter %s is at place %d, loaded in %.3f s", folder, place, time.perf_counter() - begin)

    def _allocated_bytes(self) -> int:
        """Bytes allocated on this rank's GPU, counted every `_STEPS_A_COUNT` steps: torch takes 0.1 ms for it. 0 on a CPU."""
        if self.parallel.device.type == "cuda" and self._num_results % _STEPS_A_COUNT == 0:
            self._device_bytes = torch.cuda.memory_allocated()
        self._num_results += 1
        return self._device_bytes

    def _num_top(self, rows: list[Row]) -> list[int]:
        """For each sample: how many of the most likely tokens its slot asks for; -1 where it asks for no logprobs."""
        asked = self._slots.top_logprobs
        return [asked[row.slot] for row in rows if row.samples for _ in range(1 + row.num_drafts)]

    def _logprobs(self, sampled: Sampled, num_top: list[int]) -> list[TokenLogprob | None]:
        """One entry for each sample, None where its slot did not ask. num_top: `_num_top`."""
        wanted = [i for i, top in enumerate(num_top) if top >= 0]
        if sampled.logprobs is not None:
            reported = sampled.logprobs()
            found = [(reported[i], num_top[i]) for i in wanted]
            values = [TokenLogprob(each.logprob, each.top[:count]) for each, count in found]
        else:
            logits = self.backend.logits_of_samples(wanted)
            values = token_logprobs(logits, [sampled.tokens[i] for i in wanted], [num_top[i] for i in wanted])
        result: list[TokenLogprob | None] = [None] * len(num_top)
        for i, value in zip(wanted, values, strict=True):
            result[i] = value
        return result

    def _prompt_logprobs(self, rows: list[Row]) -> list[PromptLogprobs]:
        """Logprobs of the known tokens that follow each position of the rows whose slots ask for them."""
        result = []
        begin = end = 0
        for i, row in enumerate(rows):
            begin, end = end, end + row.length
            if not self._slots.prompt_logprobs[row.slot]:
                continue
            tokens = self._slots.known_tokens[row.slot]
            known = min(row.start + row.length + 1, len(tokens))  # targets are start + 1 .. known
            num_top = max(0, self._slots.top_logprobs[row.slot])
            values: list[TokenLogprob] = []
            for at in range(row.start, known - 1, LOGITS_AT_A_TIME):
                count = min(LOGITS_AT_A_TIME, known - 1 - at)
                first = begin + at - row.start
                logits = self.backend.logits_of_tokens(range(first, first + count))
                values += token_logprobs(logits, list(tokens[at + 1 : at + 1 + count]), [num_top] * count)
            if values:
                result.append(PromptLogprobs(i, row.start, values))
        return result
