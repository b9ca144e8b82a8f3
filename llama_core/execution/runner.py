"""One rank's engine: holds the slots, lets a backend compute and sample the rows of a step, and returns the output."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from llama_core.checkpoint.loader import Progress, planned_weights, rank_weights
from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.checkpoint.source import CheckpointSource
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError, NonFiniteLogits
from llama_core.execution.backend import LOGITS_AT_A_TIME, Backend, Sampled
from llama_core.execution.backend_choice import choose, holds, matrix_types, plan_stored, step_bytes_of
from llama_core.execution.dtypes import dtype_text
from llama_core.execution.fused.all_reduce import choose_all_reduce
from llama_core.execution.fused.backend import FusedBackend, ops_for
from llama_core.execution.fused.device import fused_device
from llama_core.execution.fused.device_slots import DeviceSlots
from llama_core.execution.fused.model import FusedTransformer
from llama_core.execution.grammar_masks import SlotGrammars
from llama_core.execution.kv_cache import CacheShape, cache_dtype
from llama_core.execution.load_report import LoadReport
from llama_core.execution.memory_budget import (
    DEVICE_WAIT_S,
    LEAST_CONTEXT,
    check_weights_fit,
    fit_context,
    free_cache_bytes,
    has_room_for_former,
    loading_bytes,
    longest_context,
    planned_weight_bytes,
    release_unused_memory,
)
from llama_core.execution.native import backend as native
from llama_core.execution.parallel import Parallel, device_name, smallest
from llama_core.execution.sampling import token_logprobs
from llama_core.execution.slots import SlotTable
from llama_core.execution.verify_files import FileChecks
from llama_core.execution.weight_plan import WeightPlan
from llama_core.model_config import ModelConfig
from llama_core.scheduling.request import TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.sliding_window import SlidingWindow
from llama_core.scheduling.step import Pending, PromptLogprobs, Row, SlotInit, StepInput, StepOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

_STEPS_A_COUNT = 64
CONTRADICTION = "no token is allowed here: the rules of the request contradict each other"


class _ReadOnce:
    """A result for two threads, of which the first reads it."""

    def __init__(self, read: Callable[[], Sampled]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._sampled: Sampled | None = None

    def __call__(self) -> Sampled:
        with self._lock:
            if self._sampled is None:
                self._sampled = self._read()
            return self._sampled


@dataclass(frozen=True, slots=True)
class _Former:
    """The cache of the ranks before. deadline: of `time.monotonic`, until which its memory is waited for. is_allocated: this
    rank has as many blocks already."""

    num_blocks: int
    deadline: float
    is_allocated: bool = False


def _may_have(config: EngineConfig, model: ModelConfig, num_blocks: int, block_bytes: int) -> bool:
    """Whether the configuration allows a cache of so many blocks, and a sequence of its longest context fits."""
    window = SlidingWindow.of(model.longest_window, config.block_size, config.max_step_tokens)
    least = window.num_held(config.max_seq_len)
    allowed = config.kv_cache_bytes is None or num_blocks * block_bytes <= config.kv_cache_bytes
    return allowed and least <= num_blocks <= (least + 1) * config.max_batch_size


class ModelRunner:
    """`load`, then `allocate_cache`, then `warm_up`, then any number of `step`s. One thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parallel: Parallel,
        slots: SlotTable,
        backend: Backend,
        report: LoadReport,
        vocabulary: "Callable[[], LLTokenizer] | None" = None,
        former: "_Former | None" = None,
    ) -> None:
        """former: the cache of the ranks that this one's group replaces."""
        self._former = former or _Former(0, 0.0)
        self.config = config
        self.model_config = model_config
        self.parallel = parallel
        self.backend = backend
        self.report = report
        self._slots = slots
        # Rank 0 samples for all ranks.
        self._grammars = (
            SlotGrammars(vocabulary, config.vocab_size, len(slots.rules), config.max_seq_len)
            if parallel.rank == 0
            else None
        )
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
        """Check the checkpoint, then read this rank's share. source: `open_checkpoint`'s if absent. vocabulary: for grammars,
        called on rank 0 in a thread; None: no request may have one. former_blocks: of the cache of the ranks that this one's
        group replaces, whose memory on a GPU is waited for.

        Raises ConfigError or CheckpointError before it allocates.
        """
        begin = time.perf_counter()
        former = _Former(former_blocks, time.monotonic() + DEVICE_WAIT_S)
        source = source or open_checkpoint(config.ckpt_dir)
        checks = FileChecks(config, source, parallel)
        checks.verify_manifest()
        model_config = source.model_config(config.vocab_size)
        reader = source.open_weights(model_config)
        checks.verify_contents(reader)
        kind, dtype, plan = choose(config, model_config, reader, parallel)

        def plan_on(num_ranks: int) -> WeightPlan:
            group = replace(parallel, rank=0, world_size=num_ranks)
            found = plan_stored(config, model_config, reader, dtype, group)
            return found if holds(kind, found) else found.expand()

        planned_bytes = planned_weight_bytes(model_config, plan, parallel)
        former_bytes = 0
        if former_blocks and parallel.device.type == "cuda":
            block_bytes = CacheShape.of(
                model_config, config.block_size, parallel, cache_dtype(config, dtype)
            ).block_bytes
            former_bytes = step_bytes_of(kind)(config, model_config, parallel, dtype) + former_blocks * block_bytes
        check_weights_fit(planned_bytes, parallel, former_bytes)
        config = fit_context(config, model_config, dtype, plan_on, parallel, step_bytes_of(kind))
        slots: SlotTable
        slots = DeviceSlots(config, parallel.device, spare=1) if kind == "fused" else SlotTable(config, parallel.device)
        share = RankShare.of(model_config, parallel.rank, parallel.world_size)
        part = reader, model_config, share, dtype, parallel.device
        weights = rank_weights(*part, on_progress)
        planned = planned_weights(*part, plan.keeps_groups, plan.quantizes, on_progress)
        backend: Backend
        if kind == "native":
            backend = native.NativeBackend(config, model_config, parallel, slots, dtype, plan, planned)
        elif isinstance(slots, DeviceSlots):
            invariant = config.batch_invariant
            ops = ops_for(parallel.device, batch_invariant=invariant)
            with torch.inference_mode():
                all_reduce = choose_all_reduce(config, parallel, ops, model_config.dim, dtype)
                common = model_config, parallel, config.max_seq_len, dtype, ops, matrix_types(plan)
                fused = FusedTransformer(*common, (), all_reduce, batch_invariant=invariant)
            backend = FusedBackend(config, fused, parallel, slots, ops, fused_device(parallel.device))
            if former_blocks and backend.captures:
                # Every rank says whether it can before any does: their warm-ups communicate.
                can_have = _may_have(
                    config, model_config, former_blocks, backend.cache_block_bytes
                ) and has_room_for_former(
                    parallel,
                    former_blocks * backend.cache_block_bytes + backend.unallocated_bytes(config.max_seq_len),
                    loading_bytes(model_config, plan, parallel, dtype),
                    taken_bytes=backend.weight_bytes,
                    keeps_headroom=config.kv_cache_bytes is None,
                    deadline=former.deadline,
                )
                former = replace(former, is_allocated=bool(smallest(parallel, can_have)))
            if former.is_allocated:
                backend.load_while_capturing(planned, former_blocks)
                release_unused_memory(parallel)
            else:
                with torch.inference_mode():
                    backend.load(planned)
        else:
            # Imported here, because only the reference model may need fairscale.
            from llama_core.execution.reference.backend import TorchBackend
            from llama_core.execution.reference.model import Transformer

            with torch.inference_mode():
                model = Transformer(model_config, parallel, config.max_seq_len)
                model.load_state_dict(dict(weights), strict=True, assign=True)
            backend = TorchBackend(config, model.eval(), parallel, slots)
        checks.verify_unchanged()
        report = LoadReport(
            seconds=time.perf_counter() - begin,
            weight_bytes=backend.weight_bytes,
            device=f"{device_name(parallel.device)}, {backend.name}",
            dtype=dtype_text(config, plan, reader.dtype),
            files_id=checks.files_id,
            digest=checks.digest,
            max_seq_len=config.max_seq_len,
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
        return cls(config, model_config, parallel, slots, backend, report, vocabulary, former)

    def prepare_grammars(self) -> None:
        """Load the vocabulary for grammars in the background, so that no step waits for it."""
        if self._grammars is not None:
            self._grammars.prepare()

    def seconds_waited(self) -> float | None:
        """Seconds waited for the other ranks in all steps so far; None where the backend does not measure it. From any
        thread."""
        return self.backend.seconds_waited

    def seconds_sampled(self) -> float | None:
        """Seconds spent in sampling in all steps so far; None where the backend does not measure it. From any thread."""
        return self.backend.seconds_sampled

    def max_num_blocks(self) -> int:
        """Cache blocks that this rank's memory allows, at most what a full batch of full-length sequences needs.

        Where the ranks chose max_seq_len, lowers it once more if memory became less than was planned; then every rank must
        call this. Raises ConfigError if not even one sequence of max_seq_len fits.
        """
        if self._former.is_allocated:
            return self._former.num_blocks
        block_bytes, former = self.backend.cache_block_bytes, self._former
        former_bytes = former.num_blocks and (
            former.num_blocks * block_bytes + self.backend.unallocated_bytes(self.config.max_seq_len)
        )
        free = (
            0
            if self.config.kv_cache_bytes
            else free_cache_bytes(
                self.parallel,
                taken_bytes=self.backend.weight_bytes,
                former_bytes=former_bytes,
                deadline=former.deadline,
            )
        )

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
            if self._former.num_blocks:
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
        for init in batch.admit:
            slots.admit(init)
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
        masks = None
        if grammars is not None and grammars.has_grammars:
            # The grammars' thread reads what the step before samples.
            self.backend.queue_samples()
            masks = grammars.begin(rows)
        pending = self.backend.start(rows, keep_logits=wanted, masks=masks)
        read = pending.result
        if grammars is not None and masks is not None:
            read = _ReadOnce(pending.result)
            grammars.follow(masks, lambda: read().tokens)

        @torch.inference_mode()
        def result() -> StepOutput:
            sampled = read()
            if masks is not None:
                masks.wait()
            reasons = masks.reasons if masks is not None else {}
            output = StepOutput(
                epoch=batch.epoch,
                step=batch.step,
                tokens=sampled.tokens,
                logprobs=self._logprobs(sampled, num_top) if wanted else [],
                prompt_logprobs=self._prompt_logprobs(rows) if wanted_of_prompts else [],
                non_finite=sampled.non_finite,
                refused=[(i, reasons.get(i, CONTRADICTION)) for i in sampled.refused],
                forced=masks.forced if masks is not None else [],
                shortened=masks.shortened if masks is not None else [],
                # The previous step may have ended after this step was started.
                elapsed_ms=(time.perf_counter() - max(begin, self._ended)) * 1e3,
                device_memory_bytes=self._allocated_bytes(),
            )
            self._ended = time.perf_counter()
            return output

        # The backend keeps the hidden states of the latest step only.
        if pending.is_done or wanted_of_prompts:
            return Pending.done(result())
        return Pending(result, pending.is_ready)

    def _allocated_bytes(self) -> int:
        """Of this rank's device, counted now and then: torch takes 0.1 ms for it."""
        if self.parallel.device.type == "cuda" and self._num_results % _STEPS_A_COUNT == 0:
            self._device_bytes = torch.cuda.memory_allocated()
        self._num_results += 1
        return self._device_bytes

    def _num_top(self, rows: list[Row]) -> list[int]:
        """Of each sample: how many of the most likely tokens its slot asks for, -1 where it asks for no logprobs."""
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
