"""Several models behind one front, the successor of an engine, and the number of engines."""

from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import serve

from deployments.args import EngineArgs
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet import successor
from deployments.fleet.directory import _deployed_args
from deployments.fleet.scaling import by_sequences
from deployments.fleet.served_model import ServedModel
from deployments.openai.errors import ModelNotFound
from deployments.openai.plan import engine_of
from llama_core.scheduling.request import BACKGROUND, Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support import adapters
from tests.support.fake_cluster import FakeCluster, Member
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation, expected_output
from tests.support.fleets import FleetOfEngines, seeded
from tests.support.recovering_service import read, steady


class OfServe(Member):
    async def deployed_args(self) -> dict[str, Any] | None:
        return _deployed_args(self.application)


async def test_requests_choose_a_model_and_all_fronts_have_the_same_default() -> None:
    async with FleetOfEngines(lambda: FakeGroup(num_blocks=400, token=steady)) as fleet:
        for name in ("b", "a"):
            await fleet.start(model_id=name)
        assert fleet.fleet.model_id == "a" and set(fleet.fleet.models) == {"a", "b"}
        assert {engine.model for engine in fleet.fleet.describe().engines} == {"a", "b"}
        assert engine_of(fleet.fleet, "b").model_id == "b"
        with pytest.raises(ModelNotFound, match="those served are"):
            engine_of(fleet.fleet, "c")
        (stream,) = await fleet.submit([1, 5], SamplingParams(max_tokens=3, temperature=0.0))
        assert len(await read(stream)) == 3
        assert [engine.service.loop.num_requests for engine in fleet.engines] == [0, 1]


@pytest.mark.parametrize("node", ["this node", "another node"])
async def test_a_stream_of_a_remote_engine_has_the_tokens_and_text_of_a_local_one(node: str) -> None:
    async with FleetOfEngines(lambda: FakeGroup(num_blocks=400, token=steady)) as fleet:
        engine = await fleet.start(node)
        (stream,) = await fleet.submit([1, 5], SamplingParams(max_tokens=60, temperature=0.0))
        assert await read(stream) == continuation([1, 5], 60, steady)
        assert engine_of(fleet.fleet, None).tokenizer.n_words == engine.service.tokenizer.n_words
        await until(lambda: fleet.fleet.describe().engines[0].requests == 1)


async def test_a_request_does_not_sum_up_the_state_of_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FleetOfEngines(lambda: FakeGroup(num_blocks=400, token=steady)) as fleet:
        await fleet.start()
        monkeypatch.delattr(ServedModel, "describe")
        model = engine_of(fleet.fleet, "demo")
        model.check_capacity()
        assert 0 < model.max_seq_len < model.max_request_tokens
        (stream,) = await model.submit(Request([[1, 5]], [SamplingParams(max_tokens=3, temperature=0.0)]))
        assert len(await read(stream)) == 3


async def test_a_front_takes_requests_while_more_background_ones_wait_than_the_queue_has_room_for() -> None:
    async with FleetOfEngines(seeded) as fleet:
        engine = await fleet.start(max_batch_size=4, max_queue=1)
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        background = [(await fleet.submit([1, 5], params, priority=BACKGROUND))[0] for _ in range(4)]
        loop = engine.service.loop
        await until(lambda: loop.scheduler.num_running == 4)
        (first,) = await fleet.submit([1, 6], params)
        await until(lambda: fleet.links[0].running == 1 and loop.scheduler.num_waiting == 4)
        (second,) = await fleet.submit([1, 7], params)
        for stream in (first, second, *background):
            assert len(await read(stream)) == 60


@pytest.mark.parametrize(
    ("changes", "is_coming"),
    [
        ({}, True),
        ({"max_queue": 7, "max_batch_size": 3}, True),
        ({"dtype": "bfloat16"}, False),
        ({"model_parallel_size": 1}, False),
        ({"max_seq_len": 64}, False),
        ({"batch_invariant": True}, False),
        ({"chat_template": "{{ messages }}"}, False),  # it may end answers at other tokens
        ({"chat_format": "llama3"}, False),
        ({"tool_format": "hermes", "sampling_defaults": "greedy"}, True),
        (None, False),
    ],
)
async def test_a_successor_is_coming_where_the_deployed_arguments_compute_the_same_bits(
    changes: dict[str, Any] | None, is_coming: bool
) -> None:
    given = {"ckpt_dir": str(GOLDEN / "mp2"), "dtype": "float32", "device": "cpu"}
    cluster = FakeCluster(args={"": None if changes is None else given | changes})
    one = successor.Successor(EngineArgs(**given | {"model_parallel_size": 2}), Member(cluster))
    assert await one.is_coming() is is_coming


async def test_no_successor_is_coming_where_the_files_have_changed_or_serve_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = copytree(GOLDEN / "mp2", tmp_path / "model")
    (folder / "own.jinja").write_text("{{ messages }}")
    given = {"ckpt_dir": str(folder), "model_parallel_size": 2, "chat_template": str(folder / "own.jinja")}
    args = EngineArgs(**given | {"device": "cpu"})
    cluster = FakeCluster(args={"": given})
    for name in ("consolidated.00.pth", "tokenizer.model", "own.jinja"):
        one = successor.Successor(args, Member(cluster))
        assert await one.is_coming()
        file = folder / name
        file.write_bytes(file.read_bytes())
        assert not await one.is_coming()
    one = successor.Successor(args, Member(cluster))
    with monkeypatch.context() as patch:
        patch.setattr(successor, "code_version", lambda: "of a new release")
        assert not await one.is_coming()
    assert await one.is_coming()
    cluster.is_away = True
    assert not await one.is_coming()


@pytest.mark.parametrize(
    ("runtime_env", "is_coming"),
    [
        ({}, True),
        ({"env_vars": {"RELEASE": "2"}}, True),  # as the documentation has for new code under the same path
        ({"env_vars": {"LLAMA_DTYPE": "bfloat16"}}, False),
        ({"working_dir": "https://example.com/2.zip"}, False),  # whose code is unknown
    ],
)
async def test_a_successor_is_coming_where_the_deployed_environment_has_the_same_code(
    monkeypatch: pytest.MonkeyPatch, runtime_env: dict[str, Any], is_coming: bool
) -> None:
    """The environment of this process is that of the engine."""
    args = {"ckpt_dir": str(GOLDEN / "mp2"), "device": "cpu", "model_parallel_size": 2}
    config = {"args": args, "runtime_env": runtime_env}
    details = {"applications": {"demo": {"status": "RUNNING", "deployed_app_config": config}}}
    client = SimpleNamespace(get_serve_details=lambda: details)
    monkeypatch.setattr(serve.context, "_get_global_client", lambda: client)
    one = successor.Successor(EngineArgs(**args), OfServe(FakeCluster(), "demo"))
    assert await one.is_coming() is is_coming
    details["applications"]["demo"]["status"] = "DELETING"
    assert not await one.is_coming()


@pytest.mark.parametrize(
    ("loads", "present", "number"),
    [
        ([0, 0], 2, 0),
        ([16], 1, 1),
        ([17], 1, 2),
        ([40, 9], 2, 4),
        ([], 2, 2),  # autoscaling has just been turned on
        ([5], 2, 2),  # the other engine's statistics are still to come
        ([40], 2, 3),
        ([0, 0], 1, 0),  # those of an engine that has left are still there
    ],
)
def test_engines_are_as_many_as_their_sequences_need_and_no_fewer_until_all_have_told(
    loads: list[int], present: int, number: int
) -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={"sequences": dict(enumerate(loads))} if loads else {},
        current_num_replicas=present,
        config=SimpleNamespace(target_ongoing_requests=16),
    )
    assert by_sequences(context) == (number, {})


async def test_adapters_of_engines_are_models_and_their_streams_move_with_them(tmp_path: Path) -> None:
    folder = tmp_path / "poet"
    adapters.write(folder, GOLDEN / "mp1", adapters.SHAPES["all"])
    async with FleetOfEngines(seeded) as fleet:
        given: dict[str, Any] = {"ckpt_dir": str(GOLDEN / "mp1"), "lora_adapters": {"poet": str(folder)}}
        first = await fleet.start(**given)
        await fleet.start(ckpt_dir=str(GOLDEN / "mp1"))
        poet = engine_of(fleet.fleet, "poet")
        assert set(fleet.fleet.models) == {"demo", "poet"} and poet.model_id == "poet"
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        streams = await fleet.submit([1, 5], params)
        streams += cast(list[SequenceStream], await poet.submit(Request([[1, 5]], [params])))
        await until(lambda: all(stream.sequence.length > 6 for stream in streams))
        first.die()
        await fleet.start(**given)
        tokens = [await read(stream) for stream in streams]
        assert tokens == [expected_output(stream.sequence) for stream in streams]
        assert tokens[0] != tokens[1]
