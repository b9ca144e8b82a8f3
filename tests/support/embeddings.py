"""Embeddings by a rank's runner and a scheduler, and those of transformers. Runs on every rank of a group."""

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llama_core.backends.parallel import Parallel
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import Pooling, SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from tests.support import families
from tests.support.hugging_face import VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES: tuple[Pooling, ...] = ("mean", "last", "first")


def new_runner(parallel: Parallel, directory: str, backend: str, **overrides: Any) -> ModelRunner:
    fields: dict[str, Any] = {"dtype": "float32", "max_step_tokens": 23} | overrides
    config = EngineConfig(directory, VOCAB_SIZE, families.MAX_SEQ_LEN, 8, device="cpu", backend=backend, **fields)
    runner = ModelRunner.load(config, parallel)
    runner.allocate_cache(runner.max_num_blocks())
    return runner


def embedding(prompt: list[int], pooling: Pooling, adapter: str = "") -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=0, pooling=pooling)
    return Sequence(list(prompt), params, len(prompt), terms=Terms(adapter=adapter))


def chat(prompt: list[int], max_tokens: int) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), len(prompt) + max_tokens)


def run(
    runner: ModelRunner, sequences: list[Sequence], preempted_at: Collection[int] = (), **options: Any
) -> Scheduler:
    """All sequences to their ends, together. preempted_at: the steps after which all that run are preempted."""
    config, num_blocks = runner.config, runner.max_num_blocks()
    scheduler = Scheduler(SchedulerConfig.of(config, frozenset(), **options), BlockPool(num_blocks, config.block_size))
    for seq in sequences:
        scheduler.add(seq)
    for number in itertools.count(1):
        if (batch := scheduler.schedule()) is None:
            return scheduler
        scheduler.commit(runner.step(batch))
        while number in preempted_at and scheduler.num_running:
            scheduler._preempt(scheduler._running[-1])
    raise AssertionError


def vectors(
    parallel: Parallel, directory: str, backend: str, requests: list[tuple[list[int], Pooling]], **overrides: Any
) -> list[bytes]:
    """The embeddings of requests in one batch."""
    sequences = [embedding(prompt, pooling) for prompt, pooling in requests]
    run(new_runner(parallel, directory, backend, **overrides), sequences)
    assert not any(seq.error for seq in sequences)
    return [seq.embedding or b"" for seq in sequences]


@torch.inference_mode()
def of_transformers(model: "PreTrainedModel", prompt: list[int], pooling: Pooling) -> torch.Tensor:
    """Pooled from `last_hidden_state`, which the final norm has passed."""
    states = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].float()
    return {"mean": states.mean(0), "last": states[-1], "first": states[0]}[pooling]


def as_tensor(embedded: bytes | None) -> torch.Tensor:
    assert embedded
    return torch.from_numpy(np.frombuffer(embedded, "<f4").copy())
