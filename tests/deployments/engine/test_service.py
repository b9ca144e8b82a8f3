"""A replica's engine from start to end, over a fake group, and the server's arguments."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.args import PROJECT_ROOT, ServerArgs, resolve
from deployments.engine.service import LlamaService
from llama_core.config import DEFAULT_STEP_TOKENS, EngineConfig
from llama_core.errors import CheckpointError, ConfigError, LlamaError, NotReady, TokenizerError
from llama_core.grammar.build import json_object_grammar
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler_config import SchedulerConfig
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import continuation
from tests.support.requests import submit

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def args(**changes: Any) -> ServerArgs:
    return ServerArgs(**{"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 64, "max_batch_size": 4} | changes)


def service(
    group: Callable[[], FakeGroup] | FakeGroup, failures: list[LlamaError] | None = None, **changes: Any
) -> LlamaService:
    record = failures.append if failures is not None else lambda error: None
    open_group = group if callable(group) else lambda: group
    return LlamaService(args(**changes), lambda: FakeGroupPool(open_group), on_failure=record)


async def tokens_of(engine: LlamaService, prompt: list[int]) -> list[int]:
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
    await engine.drain()
    assert engine.readiness().phase == "draining" and engine.live() and not engine.readiness().ready
    with pytest.raises(NotReady):
        submit(engine, [1, 5], GREEDY)
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


async def test_any_error_of_the_start_is_a_failure_and_not_an_endless_loading() -> None:
    class Broken(FakeGroup):
        async def start(self) -> Any:
            raise OSError("AF_UNIX path too long")

    engine = service(Broken)
    with pytest.raises(OSError, match="AF_UNIX"):
        await engine.start()
    assert not engine.live() and "AF_UNIX path too long" in engine.readiness().detail
    await engine.stop()


async def test_stop_ends_live_streams_with_an_error() -> None:
    group = FakeGroup(step_s=0.01, token=lambda tokens: 5)
    engine = service(group, drain_timeout_s=0.02)
    await engine.start()
    stream = submit(engine, [1, 5], SamplingParams(max_tokens=50))
    await anext(stream)
    await engine.drain()
    await engine.stop()
    with pytest.raises(NotReady):
        async for _ in stream:
            pass


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


def test_damaged_files_stop_the_start_before_any_rank_exists(tmp_path: Path) -> None:
    def no_group() -> FakeGroup:
        raise AssertionError("a rank was started")

    for name, error in (
        ("tokenizer.model", TokenizerError), ("params.json", ConfigError), ("consolidated.00.pth", CheckpointError),
    ):  # fmt: skip
        broken = tmp_path / name
        shutil.copytree(GOLDEN / "mp2", broken)
        (broken / name).write_bytes(b"rubbish")
        with pytest.raises(error, match=name):
            service(no_group, ckpt_dir=str(broken))
        (broken / name).unlink()
        with pytest.raises(LlamaError, match=name):
            service(no_group, ckpt_dir=str(broken), model_parallel_size=1)
    for shards, name in (((0, 0), "01.pth: holds"), ((1, 0), "00.pth: holds shard consolidated.01")):
        broken = tmp_path / name[:2] / str(shards[0])
        shutil.copytree(GOLDEN / "mp2", broken)
        for i, shard in enumerate(shards):
            shutil.copyfile(GOLDEN / "mp2" / f"consolidated.{shard:02d}.pth", broken / f"consolidated.{i:02d}.pth")
        with pytest.raises(CheckpointError, match=name):
            service(no_group, ckpt_dir=str(broken))
    with pytest.raises(ConfigError, match="model_parallel_size 5 is more than the 4 query heads"):
        service(no_group, model_parallel_size=5)


# Arguments.


def test_a_misspelt_or_ill_typed_argument_is_named() -> None:
    for changes in (
        {"max_batchsize": 4},
        {"max_batch_size": "many"},
        {"max_seq_len": 0},
        {"device": "tpu"},
        {"max_queue": True},
    ):
        with pytest.raises(ValidationError) as caught:
            args(**changes)
        assert next(iter(changes)) in str(caught.value)


def test_sizes_may_have_suffixes_and_command_line_strings_are_numbers() -> None:
    given = args(max_seq_len="8k", kv_cache_bytes="1Gi", max_batch_size="16", cpus_per_rank="0.5")
    assert (given.max_seq_len, given.kv_cache_bytes, given.max_batch_size, given.cpus_per_rank) == (
        8000,
        2**30,
        16,
        0.5,
    )
    assert args(kv_cache_bytes="512MiB").kv_cache_bytes == 512 * 2**20


def test_settings_come_from_the_environment_and_explicit_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_MODEL_ID", "from-environment")
    monkeypatch.setenv("LLAMA_MAX_BATCH_SIZE", "7")
    assert ServerArgs().model_id == "from-environment" and ServerArgs().max_batch_size == 7
    assert ServerArgs(max_batch_size=3).max_batch_size == 3
    monkeypatch.setenv("LLAMA_MAX_QUEUE", "lots")
    with pytest.raises(ValidationError, match="max_queue"):
        ServerArgs()


def test_the_default_number_of_ranks_is_that_of_the_shards(tmp_path: Path) -> None:
    assert args().num_ranks() == 2
    assert args(model_parallel_size=1).num_ranks() == 1
    with pytest.raises(CheckpointError, match="no such directory"):
        args(ckpt_dir=str(tmp_path / "nowhere")).num_ranks()


def test_the_demo_model_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("demo") == PROJECT_ROOT / "demo"
    (tmp_path / "demo").mkdir()
    assert resolve("demo") == tmp_path / "demo"
    assert resolve("/somewhere") == Path("/somewhere")


async def cached_tokens(engine: LlamaService, owner: str, last: int) -> int:
    """Cached prompt tokens of a request of `owner` that begins as every other one does."""
    stream = submit(engine, [1, *range(3, 39), last], GREEDY, owner=owner)
    async for _ in stream:
        pass
    return int(stream.num_cached_tokens)


KEYS = {"api_key_digests": ("0" * 64, "1" * 64)}


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [(KEYS, False), (KEYS | {"prefix_cache_scope": "all"}, True), ({}, True)],
    ids=["with keys", "with keys, scope all", "without keys"],
)
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


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [(KEYS, False), (KEYS | {"prefix_cache_scope": "all"}, True), ({}, True)],
    ids=["with keys", "with keys, scope all", "without keys"],
)
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


def test_every_field_of_the_engines_configuration_is_an_argument_or_made_by_the_replica() -> None:
    made = {
        "vocab_size",
        "lowers_max_seq_len",
        "serves_with_fewer_ranks",
        "manifest",
        "wants_digest",
        "verified",
        "stop_ids",
        "expected",
    }
    assert {field.name for field in fields(EngineConfig)} - set(ServerArgs.model_fields) == made


def test_arguments_reach_the_field_of_the_same_name() -> None:
    values = {"max_seq_len": 60, "max_batch_size": 3, "max_step_tokens": 33, "block_size": 8, "device": "cpu",
              "dtype": "float32", "kv_cache_bytes": 2**20, "verify_checksums": False, "speculation": False,
              "prefix_caching": False, "prefix_cache_scope": "all", "backend": "torch", "quantization": "int8"}  # fmt: skip
    config = args(**values).engine_config(100, context_length=None)
    assert {name: getattr(config, name) for name in values} == values
    assert config.ckpt_dir == str(GOLDEN / "mp2") and config.vocab_size == 100 and config.wants_digest
    scheduling = SchedulerConfig.of(config, frozenset({2}), max_waiting=5, max_waiting_tokens=50)
    assert scheduling == SchedulerConfig(3, 33, frozenset({2}), 5, 0, False, 50)
    assert args().engine_config(100, context_length=None).max_step_tokens == DEFAULT_STEP_TOKENS


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


def list_digests(folder: Path, without: str | None = None) -> None:
    """Write SHA256SUMS. without: a suffix of files that it leaves out."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != without]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in paths]
    (folder / "SHA256SUMS").write_text("\n".join(lines))


async def test_a_chat_template_is_checked_by_the_list_of_digests_and_used(tmp_path: Path) -> None:
    folder = Path(with_metadata(tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    engine = service(FakeGroup(), ckpt_dir=str(folder))
    assert engine.describe().chat_format == "template"
    assert engine.chat_format.encode([{"role": "user", "content": "Hi"}])[0] == 1
    list_digests(folder, without=".jinja")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        service(FakeGroup(), ckpt_dir=str(folder))


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "config.json"]
)
async def test_every_file_that_is_read_beside_metas_weights_is_checked(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "mp1", folder)
    list_digests(folder)
    service(FakeGroup(), ckpt_dir=str(folder))
    (folder / name).write_text("{}")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        service(FakeGroup(), ckpt_dir=str(folder))


async def test_a_field_that_is_not_used_does_not_stop_the_start(tmp_path: Path) -> None:
    ckpt_dir = with_metadata(tmp_path / "model", top_k="all", eos_token_id=-1)
    assert service(FakeGroup(), ckpt_dir=ckpt_dir).describe().sampling_defaults.top_k == 0
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_k"):
        service(FakeGroup(), ckpt_dir=ckpt_dir, sampling_defaults="model")
