"""Adapters that are loaded into all engines, and unloaded, while they serve."""

import asyncio
import logging
import os
from pathlib import Path
from shutil import copytree
from typing import cast

import pytest

from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet.cluster import ENGINE
from deployments.fleet.loaded_adapters import AdapterLoader
from deployments.openai.plan import engine_of
from llama_core.errors import InvalidParameter, NotReady
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support import adapters
from tests.support.fake_cluster import Member
from tests.support.fake_rank_group import until
from tests.support.fake_ranks import expected_output
from tests.support.fleets import FleetOfEngines, seeded
from tests.support.recovering_service import read

MODEL = str(GOLDEN / "mp1")
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(("poet", "clerk")):
        adapters.write(tmp_path / "root" / name, GOLDEN / "mp1", adapters.SHAPES["all"], seed)
    return tmp_path / "root"


@pytest.fixture
def fleet() -> FleetOfEngines:
    return FleetOfEngines(seeded)


def loader_of(fleet: FleetOfEngines) -> AdapterLoader:
    return AdapterLoader(fleet.fleet, Member(fleet.cluster), ENGINE)


async def begin(fleet: FleetOfEngines, model: str) -> SequenceStream:
    """A stream that has some tokens."""
    streams = await engine_of(fleet.fleet, model).submit(Request([[1, 5]], [LONG]))
    (stream,) = cast(list[SequenceStream], streams)
    await until(lambda: stream.sequence.length > 6)
    return stream


async def test_a_loaded_adapter_reaches_every_engine_and_its_streams_move_with_it(
    fleet: FleetOfEngines, root: Path
) -> None:
    async with fleet:
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        await loader_of(fleet).load("poet", "poet", None, replaces=False)
        assert all(set(engine.service.adapters) == {"poet"} for engine in fleet.engines)
        streams = [await begin(fleet, "poet"), await begin(fleet, "poet")]
        for engine in fleet.engines:
            engine.die()
        await until(lambda: not fleet.fleet.describe().engines)
        late = asyncio.create_task(begin(fleet, "poet"))  # waits for an engine
        third = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        assert set(third.service.adapters) == {"poet"}
        streams.append(await late)
        tokens = [await read(stream) for stream in streams]
        assert tokens == [expected_output(stream.sequence) for stream in streams]


async def test_an_unloaded_adapter_has_no_name_and_its_streams_go_on(fleet: FleetOfEngines, root: Path) -> None:
    async with fleet:
        first = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        loader = loader_of(fleet)
        await loader.load("poet", "poet", "demo", replaces=False)
        streams = [await begin(fleet, "poet"), await begin(fleet, "poet")]
        assert await loader.unload("poet", None)
        assert set(fleet.fleet.models) == {"demo"}
        first.die()  # the other engine continues what this one computed
        tokens = [await read(stream) for stream in streams]
        assert tokens == [expected_output(stream.sequence) for stream in streams]
        assert not await loader.unload("poet", None)


async def test_a_loaded_adapter_is_replaced_in_place_alone(fleet: FleetOfEngines, root: Path) -> None:
    async with fleet:
        engine = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        loader = loader_of(fleet)
        await loader.load("poet", "poet", None, replaces=False)
        before = engine.service.adapters["poet"]
        with pytest.raises(InvalidParameter, match="a model of this name is served"):
            await loader.load("poet", "clerk", None, replaces=False)
        with pytest.raises(InvalidParameter, match="a model of this name is served"):
            await loader.load("demo", "clerk", None, replaces=True)
        await loader.load("poet", "clerk", None, replaces=True)
        assert engine.service.adapters["poet"] != before


async def test_of_two_loads_of_one_name_at_once_one_is_refused(fleet: FleetOfEngines, root: Path) -> None:
    async with fleet:
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        loader = loader_of(fleet)
        both = [loader.load("poet", folder, None, replaces=False) for folder in ("poet", "clerk")]
        results = await asyncio.gather(*both, return_exceptions=True)
        assert {type(result) for result in results} == {InvalidParameter, type(None)}
        assert set(fleet.fleet.models) == {"demo", "poet"}


async def test_the_same_content_in_another_folder_is_read_there(fleet: FleetOfEngines, root: Path) -> None:
    copytree(root / "poet", root / "copy")
    async with fleet:
        engine = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        loader = loader_of(fleet)
        await loader.load("poet", "poet", None, replaces=False)
        await loader.load("poet", "copy", None, replaces=True)
        assert list(engine.service.adapter_folders.values()) == [str(root / "copy")]


@pytest.mark.parametrize(
    "folder", ["../outside", "/", "link", "linked files", "pipe", "circle", "missing", "po\0et", "y" * 300]
)
async def test_a_folder_outside_of_lora_root_or_without_an_adapter_is_refused(
    fleet: FleetOfEngines, root: Path, folder: str
) -> None:
    adapters.write(root.parent / "outside", GOLDEN / "mp1", adapters.SHAPES["all"])
    (root / "link").symlink_to(root.parent / "outside")
    for name in ("linked files", "pipe", "circle"):
        (root / name).mkdir()
    for file in (root.parent / "outside").iterdir():
        (root / "linked files" / file.name).symlink_to(file)
    (root / "circle" / "adapter_config.json").symlink_to("adapter_config.json")
    os.mkfifo(root / "pipe" / "adapter_config.json")
    async with fleet:
        engine = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        with pytest.raises(InvalidParameter) as caught:
            await loader_of(fleet).load("poet", folder, None, replaces=False)
        assert str(root.parent) not in caught.value.message
        assert not engine.service.adapters


async def test_other_files_on_a_node_another_base_and_no_engine_are_refused(
    fleet: FleetOfEngines, root: Path, tmp_path: Path
) -> None:
    adapters.write(tmp_path / "other" / "poet", GOLDEN / "mp1", adapters.SHAPES["all"], seed=7)
    async with fleet:
        loader = loader_of(fleet)
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        with pytest.raises(InvalidParameter, match="base_model_name: must be one of 'demo'"):
            await loader.load("poet", "poet", "another", replaces=False)
        await fleet.start(ckpt_dir=MODEL, lora_root=str(tmp_path / "other"))
        with pytest.raises(InvalidParameter, match="different files"):
            await loader.load("poet", "poet", None, replaces=False)
        fleet.cluster.replicas.clear()
        with pytest.raises(NotReady):
            await loader.load("poet", "poet", None, replaces=False)


async def test_adapters_of_the_arguments_stay(fleet: FleetOfEngines, root: Path) -> None:
    async with fleet:
        given = {"poet": str(root / "poet")}
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root), lora_adapters=given)
        loader = loader_of(fleet)
        with pytest.raises(InvalidParameter, match="is in lora_adapters and stays"):
            await loader.load("poet", "clerk", None, replaces=True)
        assert not await loader.unload("poet", None)


async def test_an_adapter_whose_files_have_changed_is_left_out_where_an_engine_starts(
    fleet: FleetOfEngines, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet:
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        loader = loader_of(fleet)
        for name in ("poet", "clerk"):
            await loader.load(name, name, None, replaces=False)
        config = root / "poet" / "adapter_config.json"
        config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 8'))
        with caplog.at_level(logging.ERROR):
            second = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        assert set(second.service.adapters) == {"clerk"}
        assert ["its files have changed" in record.message for record in caplog.records] == [True]
        await asyncio.gather(*(engine.engine.sync_adapters() for engine in fleet.engines))
        assert len(caplog.records) == 1, "said once"


async def test_a_silent_engine_does_not_keep_the_name_of_an_unloaded_adapter(fleet: FleetOfEngines, root: Path) -> None:
    async with fleet:
        silent, other = [await fleet.start(ckpt_dir=MODEL, lora_root=str(root)) for _ in range(2)]
        loader = loader_of(fleet)
        await loader.load("poet", "poet", None, replaces=False)
        await until(lambda: "poet" in fleet.fleet.models)
        links = {link.engine_id: link for link in fleet.links}
        await loader_of(fleet)._cluster.remove_adapter("demo", "poet")
        await other.engine.sync_adapters()
        knows = links[other.service.engine_id]
        await until(lambda: knows.welcome is not None and not knows.welcome.adapters)
        links[silent.service.engine_id].is_suspected = True
        assert "poet" not in fleet.fleet.models


@pytest.mark.parametrize("replaces", [False, True])
async def test_streams_of_an_unloaded_adapter_end_on_the_engine_that_has_it(
    fleet: FleetOfEngines, root: Path, replaces: bool
) -> None:
    """The engine that follows, and for which other streams are held, never has it."""
    async with fleet:
        first = await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        loader = loader_of(fleet)
        for name in ("poet", "clerk"):
            await loader.load(name, name, None, replaces=False)
        unloaded, named, plain = [await begin(fleet, name) for name in ("poet", "clerk", "demo")]
        if replaces:
            await loader.load("poet", "clerk", None, replaces=True)
        else:
            await loader.unload("poet", None)
        assert first.server is not None
        await first.server.hand_over(has_successor=True, timeout_s=30)
        assert unloaded.ended and not (named.ended or plain.ended)
        first.die()
        fleet.engines.remove(first)
        await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        for stream in (unloaded, named, plain):
            assert await read(stream) == expected_output(stream.sequence)
        await first.stop()


async def test_streams_of_an_adapter_go_where_it_has_a_place(fleet: FleetOfEngines, root: Path) -> None:
    async with fleet:
        for _ in range(3):
            await fleet.start(ckpt_dir=MODEL, lora_root=str(root))
        await loader_of(fleet).load("poet", "poet", None, replaces=False)
        await until(lambda: all("poet" in fleet.fleet.models for _ in fleet.engines))
        first = await begin(fleet, "poet")
        (place,) = [link for link in fleet.links if link.streams]
        await read(first)
        await asyncio.sleep(1.0)
        assert [bool(link.places) for link in fleet.links].count(True) == 1 and place.places
        for number in range(6):
            model = engine_of(fleet.fleet, "poet")
            (stream,) = await model.submit(Request([[1, 7 + number]], [LONG]))
            assert [link for link in fleet.links if link.streams] == [place]
            await read(stream)
