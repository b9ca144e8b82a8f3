"""A replica's engine from start to end, over a fake group, and the server's arguments."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.wire.rank_status import Phase, RankStatus
from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from deployments.observe.metrics import Metrics
from llama_core.errors import CheckpointError, LlamaError, NotReady
from llama_core.grammar.build import json_object_grammar
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import continuation
from tests.support.http import samples
from tests.support.requests import submit
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def args(**changes: Any) -> ServerArgs:
    return ServerArgs(**{"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 64, "max_batch_size": 4} | changes)


def service(
    group: Callable[[], FakeGroup] | FakeGroup, failures: list[LlamaError] | None = None, **changes: Any
) -> OwnEngine:
    record = failures.append if failures is not None else lambda error: None
    open_group = group if callable(group) else lambda: group
    given = args(**changes)
    return OwnEngine(LlamaService(given, FakeGroupPool(open_group), on_failure=record), given)


async def tokens_of(engine: OwnEngine, prompt: list[int]) -> list[int]:
    return [token async for delta in submit(engine, prompt, GREEDY) for token in delta.tokens]


async def test_readiness_is_loading_then_ready_then_draining() -> None:
    group = FakeGroup()
    group.go.clear()
    engine = service(group)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    assert engine.live() and engine.readiness().phase == "loading" and not engine.readiness().ready
    with pytest.raises(NotReady) as refused:
        submit(engine, [1, 5], GREEDY)
    assert refused.value.retry_after_s >= 1
    group.go.set()
    await starting
    assert engine.readiness().ready and engine.live()
    assert await tokens_of(engine, [1, 5]) == continuation([1, 5], 8)
    stream = submit(engine, [1, 5], GREEDY)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    assert engine.readiness().phase == "draining" and engine.live() and not engine.readiness().ready
    with pytest.raises(NotReady):
        submit(engine, [1, 5], GREEDY)
    assert [token async for delta in stream for token in delta.tokens] == continuation([1, 5], 8)
    await draining
    await engine.stop()
    assert group.stopped


async def test_a_failed_start_is_not_live_and_readiness_says_why() -> None:
    group = FakeGroup()
    group.start_error = CheckpointError("consolidated.01.pth: damaged")
    engine = service(group)
    with pytest.raises(CheckpointError):
        await engine.start()
    assert not engine.live()
    assert engine.readiness().phase == "failed" and "consolidated.01.pth" in engine.readiness().detail
    with pytest.raises(NotReady, match="damaged"):
        submit(engine, [1, 5], GREEDY)
    await engine.stop()


async def test_draining_aborts_what_has_not_ended_in_time() -> None:
    group = FakeGroup(step_s=0.01, token=lambda tokens: 5)
    engine = service(group, drain_timeout_s=0.02)
    await engine.start()
    stream = submit(engine, [1, 5], SamplingParams(max_tokens=50))
    await anext(stream)
    await engine.drain()
    assert stream.ended and engine.describe().blocks_used == 0
    assert engine.readiness().phase == "draining" and engine.live()
    with pytest.raises(NotReady):
        async for _ in stream:
            pass
    await engine.stop()


async def test_the_engines_state_counts_requests_and_blocks_in_use() -> None:
    group = FakeGroup(token=lambda tokens: 5, step_s=0.005)
    engine = service(group)
    await engine.start()
    streams = [submit(engine, [1, 5], GREEDY) for _ in range(6)]
    await anext(streams[0])
    seen = engine.describe()
    assert (seen.requests_running, seen.requests_waiting, seen.blocks_total) == (4, 2, 64)
    assert seen.blocks_used == 4 and seen.world_size == 2 and seen.model == "llama-demo"
    await engine.stop()


class SlowRank(FakeGroup):
    """Rank 1 computes for half of each second, and rank 0 for a tenth."""

    async def statuses(self) -> list[RankStatus | None]:
        now_s = asyncio.get_running_loop().time()
        times = [(0, 0.9 * now_s), (1, 0.5 * now_s)]
        return [
            RankStatus(n, Phase.SERVING, 1, 1, 7, "node", int(20 * now_s), now_s, waited_s) for n, waited_s in times
        ]


async def test_a_slow_rank_is_named_once_and_its_steps_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(in_ray=False)
    engine = LlamaService(args(), FakeGroupPool(SlowRank), on_compute_ms=metrics.on_compute_ms)
    await engine.start()
    await asyncio.sleep(300)
    assert [record.message.partition(",")[0] for record in caplog.records] == ["rank 1 is slow"]
    seen = samples(metrics.render())
    assert [seen[f'llama_rank_step_seconds{{rank="{rank}"}}'] for rank in (0, 1)] == pytest.approx([0.005, 0.025])
    await engine.stop()


# Arguments.


async def cached_tokens(engine: OwnEngine, owner: str, last: int) -> int:
    """Cached prompt tokens of a request of `owner` that begins as every other one does."""
    stream = submit(engine, [1, *range(3, 39), last], GREEDY, owner=owner)
    async for _ in stream:
        pass
    return int(stream.num_cached_tokens)


KEYS = {"api_key_digests": ("0" * 64, "1" * 64)}
SCOPES = pytest.mark.parametrize(
    ("settings", "is_shared"),
    [(KEYS, False), (KEYS | {"prefix_cache_scope": "all"}, True), ({}, True)],
    ids=["with keys", "with keys, scope all", "without keys"],
)


@SCOPES
async def test_cached_blocks_are_shared_within_one_api_key_unless_the_operator_says_all(
    settings: dict[str, Any], is_shared: bool
) -> None:
    engine = service(FakeGroup(), **settings)
    await engine.start()
    assert await cached_tokens(engine, "key a", 40) == 0
    assert await cached_tokens(engine, "key b", 41) == (32 if is_shared else 0), "another key asked for this prefix"
    assert await cached_tokens(engine, "key a", 42) == await cached_tokens(engine, "key b", 43) == 32
    assert await cached_tokens(engine, "", 44) == (32 if is_shared else 0), "a handle's request without a key"
    await engine.stop()


@SCOPES
async def test_the_ranks_share_compiled_grammars_within_one_scope(settings: dict[str, Any], is_shared: bool) -> None:
    group = FakeGroup()
    engine = service(group, **settings)
    await engine.start()
    for owner in ("key a", "key a", "key b" * 1000, ""):
        params = replace(GREEDY, grammar=json_object_grammar())
        async for _ in submit(engine, [1, 5], params, owner=owner):
            pass
    scopes = [init.cache_scope for step in group.steps for init in step.admit]
    await engine.stop()
    assert scopes == [engine.cache_scope(owner) for owner in ("key a", "key a", "key b" * 1000, "")]
    assert len(set(scopes)) == (1 if is_shared else 3) and scopes[-1] == "" and max(map(len, scopes)) <= 32


def with_metadata(folder: Path, **recommended: object) -> str:
    """A copy of the golden model with a generation_config.json."""
    shutil.copytree(GOLDEN / "mp1", folder)
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return str(folder)


async def test_sampling_defaults_are_metas_the_models_or_greedy(tmp_path: Path) -> None:
    ckpt_dir = with_metadata(tmp_path / "model", temperature=0.7, top_k=20, eos_token_id=[7, 9])

    def defaults(**changes: Any) -> tuple[float, float, int]:
        found = service(FakeGroup(), ckpt_dir=ckpt_dir, **changes).describe().sampling_defaults
        return found.temperature, found.top_p, found.top_k

    assert defaults() == (0.6, 0.9, 0)
    assert defaults(sampling_defaults="model") == (0.7, 0.9, 20)
    assert defaults(sampling_defaults="greedy") == (0.0, 0.9, 0)
    with pytest.raises(ValidationError, match="sampling_defaults"):
        args(sampling_defaults="best")


async def test_every_token_of_generation_config_ends_an_answer(tmp_path: Path) -> None:
    tokens = continuation([1, 5, 9], 8)
    engine = service(FakeGroup(), ckpt_dir=with_metadata(tmp_path / "model", eos_token_id=[tokens[3], tokens[5]]))
    await engine.start()
    try:
        assert await tokens_of(engine, [1, 5, 9]) == tokens[:3]
    finally:
        await engine.stop()
