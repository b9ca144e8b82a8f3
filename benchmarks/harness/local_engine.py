"""The server's engine loop over a model in this process: the same streams, without Ray, HTTP or another process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from benchmarks.harness.load import Answer
from benchmarks.harness.workload import Request
from deployments.engine.engine_loop import EngineLoop
from llama_core import Llama
from llama_core.execution.runner import ModelRunner
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput


class LocalRunner:
    """A ModelRunner behind the engine loop's interface: steps run one after another in a thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._runner.step, batch)

    def close(self) -> None:
        self._thread.shutdown()


@asynccontextmanager
async def local_engine(llama: Llama) -> AsyncIterator[EngineLoop]:
    """A running engine loop."""
    config = llama.runner.config
    scheduler = Scheduler(
        SchedulerConfig.of(config, llama.tokenizer.stop_ids, window=llama.runner.model_config.longest_window),
        BlockPool(llama._num_blocks, config.block_size),
    )
    loop = EngineLoop(scheduler, llama.tokenizer, max_seq_len=config.max_seq_len)
    runner = LocalRunner(llama.runner)
    running = asyncio.create_task(loop.run(runner))
    try:
        yield loop
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        runner.close()


class LocalSession:
    """One client of an engine loop in this process."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._answers: list[Answer] = []

    async def ask(self, request: Request) -> None:
        began = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
        stream = self._engine.submit(request.prompt, params)
        ready = asyncio.Event()
        stream.listen(ready.set)
        token_times, num_tokens, is_over = [], 0, False
        while not is_over:
            await ready.wait()
            ready.clear()
            if (delta := stream.take()) is None:
                continue
            is_over = delta.finish_reason is not None
            if delta.tokens:
                token_times.append(time.perf_counter())
                num_tokens += len(delta.tokens)
        self._answers.append(Answer(began, time.perf_counter(), token_times, num_tokens))

    def answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    async def close(self) -> None:
        pass
