"""One replica's engine from start to end: starts ranks, scheduler and engine loop, keeps them running, and stops them.

Fronts send it requests (`deployments/fleet`). Knows nothing of texts, HTTP and Serve.
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from cluster.driver.group_info import GroupInfo
from cluster.driver.stragglers import StepWindow
from deployments.args import NUMERIC, RESOLVED, EngineArgs
from deployments.engine.context import context_reason
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.interface import (
    EngineState,
    EngineSummary,
    RankState,
    Readiness,
    SamplingDefaults,
)
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.step_report import StepStats
from deployments.engine.supervisor import GroupPool, Replacement, Supervisor
from llama_core.checkpoint.registry import format_name, open_checkpoint
from llama_core.config import EngineConfig
from llama_core.errors import EngineError, LlamaError, NotReady, RankFailure
from llama_core.files.adapter import Adapter
from llama_core.files.generation_config import read_recommended_sampling
from llama_core.files.sentence_transformers import read_embedding_form
from llama_core.rank_report import RankReport
from llama_core.remote.names import remote_name
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.text.model_text import TextOptions, open_model_text
from llama_core.text.registry import check_vocabulary, load_tokenizer, tokenizer_files
from llama_core.text.template.files import template_files

log = logging.getLogger(__name__)

RECONFIGURABLE: Final = frozenset({"max_queue", "max_queue_tokens", "sampling_defaults", "drain_timeout_s"})


class LlamaService:
    """The constructor checks the files that need no ranks. Call `start`, later `stop`."""

    def __init__(
        self,
        args: EngineArgs,
        pool: GroupPool,
        on_step: Callable[[StepStats], None] = lambda stats: None,
        on_failure: Callable[[LlamaError], None] = lambda error: None,
        on_compute_ms: Callable[[Mapping[int, float]], None] = lambda compute_ms: None,
        on_end: Callable[[MeasuredStream], None] = lambda stream: None,
    ) -> None:
        """on_step, on_failure, on_compute_ms, on_end: for metrics. Raises TokenizerError, ConfigError or CheckpointError."""
        self.args = self._given = args
        source = open_checkpoint(args.checkpoint)
        if (manifest := args.manifest()) is not None:
            manifest.check_complete(source)  # the ranks read the weights, each on its node
            manifest.verify_metadata(source, [*tokenizer_files(args.tokenizer), *template_files(args.checkpoint)])
        self.num_rows = source.num_rows()
        tokenizer = load_tokenizer(args.tokenizer, self.num_rows)
        self._model = source.model_config(tokenizer.n_words)
        check_vocabulary(args.tokenizer, tokenizer.n_words, args.checkpoint, self._model.vocab_size)
        options = TextOptions(args.chat_format, args.chat_template, args.tool_format)
        self.text = open_model_text(tokenizer, self._model.vocab_size, args.checkpoint, options)
        self.tokenizer = self.text.tokenizer
        self.sampling_defaults = _sampling_defaults(args)
        self._embedding = read_embedding_form(args.checkpoint, self._model.dim)
        self.num_ranks = args.num_ranks()
        self._model.check_world_size(self.num_ranks)
        source.num_shards()
        self._checkpoint_format = format_name(source)
        stop_ids = self.tokenizer.stop_ids | self.text.chat_format.stop_ids | source.stop_ids
        self._stop_ids = frozenset(token_id for token_id in stop_ids if token_id < self._model.vocab_size)
        context_length = self._model.context_length
        config = args.engine_config(
            self._model.vocab_size, manifest, context_length=context_length, stop_ids=self._stop_ids
        )
        self._own_adapters = args.open_adapters(self._model)
        self._adapters: Mapping[str, Adapter] = {}
        self.adapter_folders: dict[str, str] = {}  # by digest; also of unloaded adapters, whose streams go on
        self._on_step, self._on_failure, self._on_end = on_step, on_failure, on_end
        self._supervisor = Supervisor(args, config, pool, on_failure, on_compute_ms)
        self._loop: EngineLoop | None = None
        self.load_adapters({})
        self._failure: LlamaError | None = None
        self._draining = False
        self._serving: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()
        self.engine_id = uuid.uuid4().hex  # of this life of the process

    # The life of a replica.

    async def start(self) -> None:
        """Start the ranks and begin to serve. Raises the error that prevented it."""
        try:
            self._begin(await self._supervisor.start())
        except Exception as error:
            log.exception("the start failed")
            self._failure = error if isinstance(error, LlamaError) else EngineError(f"{type(error).__name__}: {error}")
            self._on_failure(self._failure)
            raise

    def _begin(self, info: GroupInfo) -> None:
        scheduler = Scheduler(
            SchedulerConfig.of(
                self.config,
                self._stop_ids,
                max_waiting=self.args.max_queue,
                max_waiting_tokens=self.args.max_queue_tokens,
                window=self._model.longest_window,
            ),
            BlockPool(info.num_blocks, self.config.block_size),
        )
        scheduler.adapter_places.folders |= self.adapter_folders
        self._loop = EngineLoop(
            scheduler,
            self.tokenizer.n_words,
            max_seq_len=self.config.max_seq_len,
            on_step=self._on_step,
            on_end=self._on_end,
        )
        self._serving = asyncio.create_task(self._serve(self._loop))
        log.info(
            "ready after %.1f s: %s, world size %d, max_seq_len %d (%s), max_batch_size %d, vocabulary %d, %d blocks of %d",
            time.monotonic() - self._started_s,
            self.args.ckpt_dir,
            self.num_ranks,
            self.config.max_seq_len,
            self._context_reason,
            self.config.max_batch_size,
            self.tokenizer.n_words,
            info.num_blocks,
            self.config.block_size,
        )

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change arguments while requests run. Raises ConfigError, or pydantic's error for a bad value."""
        self.args = self._given.changed(changes, RECONFIGURABLE)
        self.sampling_defaults = _sampling_defaults(self.args)
        if self._loop is not None:
            self._loop.scheduler.admission.limit(self.args.max_queue, self.args.max_queue_tokens)

    def open_adapter(self, folder: str) -> Adapter:
        """Of `lora_root`. Reads the files, so it blocks. Raises LlamaError."""
        return self.args.open_loaded_adapter(folder, self._model)

    def load_adapters(self, loaded: Mapping[str, Adapter]) -> None:
        """Serve these, by name, beside those of the arguments, in place of what was loaded before, whose streams go on."""
        self._adapters = {**loaded, **self._own_adapters}
        self.adapter_folders |= {each.digest: each.folder for each in self._adapters.values()}
        if self._loop is not None:
            self._loop.scheduler.adapter_places.folders |= self.adapter_folders

    async def drain(self) -> None:
        """Take no new request, and wait up to `drain_timeout_s` for the live ones to end. Those that have not are aborted."""
        self._draining = True
        if self._loop is not None and not await self._loop.drain(self.args.drain_timeout_s):
            log.warning("live requests have not ended within %.0f s and are aborted", self.args.drain_timeout_s)
            self._loop.fail(NotReady("the server has shut down"))

    async def stop(self) -> None:
        """End remaining requests and all ranks. No process of the group remains when this returns."""
        self._draining = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._loop is not None:
            self._loop.fail(NotReady("the server has shut down"))
        await self._supervisor.stop()

    @property
    def _context_reason(self) -> str:
        limit = self._supervisor.context_limit
        return context_reason(self.config.max_seq_len, self.args.max_seq_len, self._model.context_length, limit)

    @property
    def config(self) -> EngineConfig:
        """With what the first ranks have chosen, once they run."""
        return self._supervisor.config

    @property
    def model_id(self) -> str:
        return self.args.model_id

    @property
    def adapters(self) -> dict[str, str]:
        """Digests of LoRA adapters by name."""
        return {name: adapter.digest for name, adapter in self._adapters.items()}

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return self._model.vocab_size

    @property
    def loop(self) -> EngineLoop:
        """Of a service that has started."""
        assert self._loop is not None
        return self._loop

    @property
    def numerics(self) -> str:
        """Engines with equal ones, the same tokenizer and as many ranks sample the same tokens after a prompt's. Of a service
        that has started; fronts add the number of ranks."""
        reports = self.info.ranks if self.info is not None and self.info.ranks else (RankReport(),)
        report = reports[0]
        device, _, backend = report.device.partition(", ")
        gpu = "" if device.startswith("cpu") else device.partition(" ")[2]
        kind = backend.partition(",")[0]  # without the instructions, which change no bit
        parts = _digest([report]), report.dtype, gpu, kind, self.args.kv_cache_dtype, self.config.max_seq_len
        given = self.args.marked(NUMERIC, but=RESOLVED)
        further = given, sorted(self._stop_ids), dict.fromkeys(each.numerics for each in reports)
        return "|".join(map(str, [*parts, hashlib.sha256(repr(further).encode()).hexdigest()]))

    @property
    def info(self) -> GroupInfo | None:
        """The ranks that serve, or the latest that served; None until the first ranks have started."""
        return self._supervisor.info

    @property
    def step_window(self) -> StepWindow:
        """The ranks' own times in the latest steps that were measured."""
        return self._supervisor.step_window

    @property
    def replacements(self) -> Sequence[Replacement]:
        """The latest recoveries, oldest first."""
        return self._supervisor.replacements

    @property
    def num_ranks_now(self) -> int:
        """Fewer than `num_ranks` while there is no room for all."""
        return self._supervisor.num_ranks_now

    def readiness(self) -> Readiness:
        if self._failure is not None:
            return Readiness(False, "failed", self._failure.message, retry_after_s=10.0)
        if self._draining or (self._loop is not None and self._loop.is_draining):
            return Readiness(False, "draining", "shutting down", retry_after_s=5.0)
        if self._loop is None:
            phase = "fetching" if self._supervisor.is_fetching else "loading"
            return Readiness(False, phase, self._supervisor.loading, retry_after_s=2.0)
        if self._supervisor.recovering is not None:
            detail = f"{self._supervisor.recovering}; new ranks: {self._supervisor.loading}"
            return Readiness(False, "recovering", detail, retry_after_s=2.0)
        if self._supervisor.is_reduced:
            return Readiness(True, "ready", f"with {self.num_ranks_now} of {self.num_ranks} ranks, for lack of room")
        return Readiness(True, "ready")

    def live(self) -> bool:
        """False when only a new replica helps: the ranks could not be brought back, or work waits and no step completes."""
        if self._failure is not None:
            return False
        # A second deadline after the group's own shorter step deadline. Recovery has its own limits.
        return (
            self._loop is None
            or self._supervisor.recovering is not None
            or self._loop.stalled_s() < self.args.step_timeout_s + 10.0
        )

    def check_capacity(self, owner: str = "") -> None:
        """Raises NotReady if no request is taken now, or QueueFull if not even one sequence of `owner` may wait."""
        if self._loop is None or self._failure is not None or self._draining:
            raise self.readiness().not_ready()
        self._loop.check_capacity(owner)  # while ranks recover, requests wait for them

    def describe(self) -> EngineState:
        supervisor, reports = self._supervisor, self.info.ranks if self.info is not None else ()
        readiness, loop = self.readiness(), self._loop
        phase = readiness.phase
        running = waiting = num_requests = 0
        if loop is not None:
            running, waiting, num_requests = loop.scheduler.num_running, loop.scheduler.num_waiting, loop.num_requests
        node = reports[0].node if reports else ""
        state = EngineState(
            model=self.model_id,
            phase=phase,
            world_size=self.num_ranks_now,
            epoch=supervisor.epoch,
            ranks=tuple(map(RankState.of, reports)),
            spare_ranks_ready=supervisor.num_standby,
            max_seq_len=self.config.max_seq_len,
            max_seq_len_reason=self._context_reason,
            max_batch_size=self.config.max_batch_size,
            max_step_tokens=self.config.max_step_tokens,
            max_queue=self.args.max_queue,
            max_queue_tokens=self.args.max_queue_tokens,
            window=self._model.longest_window,
            block_size=self.config.block_size,
            checkpoint_digest=_digest(reports),
            checkpoint_format=self._checkpoint_format,
            stop_tokens=tuple(sorted(map(self._token_name, self._stop_ids))),
            chat_format=self.text.chat_format.name,
            tool_format=self.text.answer_format.tool_format.name,
            sampling_defaults=self.sampling_defaults,
            checkpoint=self.args.ckpt_dir if remote_name(self.args.ckpt_dir) else "",
            detail=readiness.detail,
            embedding=self._embedding,
            engines=(EngineSummary(self.engine_id, self.model_id, node, phase, num_requests, running, waiting),),
        )
        if loop is None:
            return state
        scheduler = loop.scheduler
        return replace(
            state,
            blocks_total=scheduler.pool.num_blocks,
            blocks_used=scheduler.pool.num_used,
            requests_running=running,
            requests_waiting=waiting,
            background_waiting=scheduler.num_background_waiting,
            preemptions=scheduler.num_preemptions,
            prefix_cache_hit_tokens=scheduler.num_prefix_hits,
            draft_tokens=scheduler.speculation.num_drafts,
            draft_tokens_accepted=scheduler.speculation.num_accepted,
        )

    def _token_name(self, token: int) -> str:
        names = (name for name, known in self.tokenizer.control_texts.items() if known == token)
        return next(names, f"token {token}")

    async def _serve(self, loop: EngineLoop) -> None:
        try:
            await self._supervisor.serve(loop)
        except LlamaError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("the engine loop failed")
            self._give_up(EngineError(f"the engine loop failed: {type(error).__name__}"))

    def _give_up(self, error: LlamaError) -> None:
        """End every live request with `error`; Serve then replaces the replica."""
        log.error("the engine has failed: %s", error.message)
        self._failure = error
        if not isinstance(error, RankFailure):  # the supervisor has counted those
            self._on_failure(error)
        if self._loop is not None:
            self._loop.fail(error if isinstance(error, EngineError) else EngineError(error.message))


def _sampling_defaults(args: EngineArgs) -> SamplingDefaults:
    """The argument `sampling_defaults`: Meta's, the model's as far as it recommends any, or greedy."""
    if args.sampling_defaults == "greedy":
        return SamplingDefaults(temperature=0.0)
    if args.sampling_defaults == "builtin":
        return SamplingDefaults()
    own = read_recommended_sampling(args.checkpoint)._asdict()
    return SamplingDefaults(**{field: value for field, value in own.items() if value is not None})


def _digest(reports: Sequence[RankReport]) -> str:
    """The digest of the checkpoint, which is the same on every rank."""
    return next((report.digest.value for report in reports if report.digest is not None), "")
