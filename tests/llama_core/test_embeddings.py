"""Embeddings are transformers' pooled hidden states; their bits depend on the text alone."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llama_core.backends.parallel import alone
from llama_core.backends.runner import ModelRunner
from llama_core.batch_loop import run_batch
from llama_core.errors import InvalidParameter, NonFiniteLogits
from llama_core.files.adapter import open_adapter
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support import adapters, embeddings, families
from tests.support.embeddings import MODES, as_tensor, chat, embedding, of_transformers, run
from tests.support.simulated_device import CapturableOps, SimulatedDevice

# Norms of heads; norms behind operations, and windows; a multiplier of the embedding; factors that are 1 + weights; experts.
NAMES = ("qwen3", "exaone4", "granite", "gemma3", "qwen3-moe")
REQUESTS = [(prompt, mode) for prompt in families.PROMPTS for mode in MODES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    root = tmp_path_factory.mktemp("embedders")
    return {name: (str(root / name), families.new_model(root / name, name)) for name in NAMES}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_embeddings_are_the_pooled_hidden_states_of_transformers(
    ranks: Any, models: dict[str, tuple[str, Any]], backend: str, world_size: int
) -> None:
    for name in NAMES if world_size == 1 else NAMES[:1]:
        directory, model = models[name]
        about = directory, backend, REQUESTS
        if world_size == 1:
            results = [embeddings.vectors(alone("cpu"), *about)]
        else:
            results = ranks(world_size).call(embeddings.vectors, *about)
        for got in results:
            for (prompt, mode), vector in zip(REQUESTS, got, strict=True):
                expected = of_transformers(model, prompt, mode)
                assert as_tensor(vector) == pytest.approx(expected, abs=2e-5), (name, mode, len(prompt))


def prompts_of(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(1, 600) for _ in range(length)] for length in draw.sample(range(1, 100), count)]


FIELDS = [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_bits_depend_on_the_text_alone(models: dict[str, tuple[str, Any]], fields: dict[str, Any]) -> None:
    """Not on other rows, chunks, preemption, or a cached prefix. Chunks of 7 divide neither blocks nor tiles."""
    directory, _ = models["qwen3"]
    requests = [(prompt, mode) for prompt in prompts_of(8) for mode in MODES]
    runner = embeddings.new_runner(alone("cpu"), directory, "native", max_step_tokens=128, **fields)
    expected = []
    for prompt, mode in requests:
        run(runner, [seq := embedding(prompt, mode)])
        expected.append(seq.embedding)
    assert len(set(expected)) == len(requests) - any(len(prompt) == 1 for prompt, _ in requests) * 2

    def together(runner: ModelRunner, **options: Any) -> tuple[list[bytes | None], Any]:
        sequences = [embedding(prompt, mode) for prompt, mode in requests]
        chats = [chat(prompt[:40], 20) for prompt, _ in requests[:6]]
        mixed = [each for pair in zip(chats, sequences, strict=False) for each in pair] + sequences[len(chats) :]
        scheduler = run(runner, mixed, **options)
        assert all(len(each.output) == 20 for each in chats)
        return [seq.embedding for seq in sequences], scheduler

    got, scheduler = together(runner)
    assert got == expected and scheduler.num_prefix_hits > 0
    small = embeddings.new_runner(alone("cpu"), directory, "native", max_step_tokens=23, **fields)
    assert together(small)[0] == expected
    got, scheduler = together(small, preempted_at=(2, 5, 9, 14, 40))
    assert got == expected and scheduler.num_preemptions >= 10


def test_steps_that_cuda_graphs_compute_give_the_states_of_transformers(models: dict[str, tuple[str, Any]]) -> None:
    directory, model = models["qwen3"]
    device = SimulatedDevice(1, 0.3)
    with patch("llama_core.backends.rank_loading.choose_ops", lambda kind, where, **options: (CapturableOps(), device)):
        got = embeddings.vectors(alone("cpu"), directory, "fused", REQUESTS)
    for (prompt, mode), vector in zip(REQUESTS, got, strict=True):
        assert as_tensor(vector) == pytest.approx(of_transformers(model, prompt, mode), abs=2e-5)
    assert device.num_replays > 0


def test_a_prompt_that_is_cached_is_computed_again_where_all_its_states_are_asked_for(
    models: dict[str, tuple[str, Any]],
) -> None:
    runner = embeddings.new_runner(alone("cpu"), models["qwen3"][0], "native")
    prompt = families.PROMPTS[0]
    sequences = [embedding(prompt, mode) for mode in ("last", "last", "mean", "first")]
    scheduler = run(runner, sequences[:1])
    numbers = []
    for seq in sequences[1:]:
        scheduler.add(seq)
        while (batch := scheduler.schedule()) is not None:
            scheduler.commit(runner.step(batch))
        numbers.append(seq.num_cached)
    assert numbers == [80, 0, 0]
    assert sequences[0].embedding == sequences[1].embedding


def test_an_embedding_of_an_adapter_is_that_of_merged_weights(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = families.new_model(base, "qwen3")
    merged = adapters.write(tmp_path / "a", base, adapters.SHAPES["all"])
    runner = adapters.new_runner(alone("cpu"), str(base), "native")
    opened = open_adapter(tmp_path / "a", runner.model_config, adapters.MAX_RANK)
    prompt = families.PROMPTS[0]
    both = [embedding(prompt, "mean", adapter) for adapter in ("", opened.digest)]
    run_batch(runner, runner.max_num_blocks(), frozenset(), both, [opened])
    assert as_tensor(both[0].embedding) == pytest.approx(of_transformers(model, prompt, "mean"), abs=2e-5)
    parameters = dict(model.named_parameters())
    for name, a, b, scale in merged:
        parameters[name].data += scale * (b @ a)
    assert as_tensor(both[1].embedding) == pytest.approx(of_transformers(model, prompt, "mean"), abs=2e-5)


def test_a_state_that_is_not_finite_fails_its_own_request(models: dict[str, tuple[str, Any]]) -> None:
    runner = embeddings.new_runner(alone("cpu"), models["qwen3"][0], "native")
    backend: Any = runner.backend
    backend._native.llama_poke_embedding(backend._engine, 9, torch.full((64,), torch.nan).data_ptr())
    broken, other = embedding([7, 9, 8], "mean"), embedding([7, 8], "mean")
    run(runner, [broken, other])
    assert isinstance(broken.error, NonFiniteLogits) and broken.finish_reason is FinishReason.ERROR
    assert other.finish_reason is FinishReason.LENGTH and other.error is None


@pytest.mark.parametrize("fields", [{"pooling": "max"}, {"max_tokens": 1}, {"prompt_logprobs": True}])
def test_an_embedding_has_neither_tokens_nor_log_probabilities(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"pooling": "mean", "max_tokens": 0} | fields
    with pytest.raises(InvalidParameter, match="pooling"):
        SamplingParams(**given)
