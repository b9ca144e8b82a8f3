"""What an engine must have in common with another one to continue its streams, and what not."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest

from cluster.driver.group_info import GroupInfo
from deployments import args
from deployments.args import EngineArgs
from deployments.links.model_files import ModelFiles, PackedFile
from llama_core.errors import NotReady
from llama_core.files import code
from llama_core.files.code import code_version
from llama_core.rank_report import RankReport
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import RecoveringService, read, steady
from tests.support.virtual_loop import BOTH_ORDERS

LOOPS = BOTH_ORDERS
PROMPT = [1, *range(3, 40)]
LONG = SamplingParams(temperature=0.0, max_tokens=60)
NUMERIC: dict[str, Any] = {
    "max_seq_len": 32,
    "kv_cache_dtype": "fp8",
    "quantization": "int8",
    "batch_invariant": True,
    "max_lora_rank": 8,
}


class Reporting(FakeGroup):
    """A group whose rank reports these."""

    def __init__(self, numerics: str = "", dtype: str = "float32", device: str = "cpu") -> None:
        super().__init__(num_blocks=400, step_s=0.05, token=steady)
        self._report = RankReport(numerics=numerics, dtype=dtype, device=device)

    async def start(self) -> GroupInfo:
        return replace(await super().start(), ranks=(self._report,))


async def numerics_of(group: FakeGroup, **args: Any) -> str:
    async with RecoveringService(lambda: group, **args) as running:
        return running.service.numerics


async def test_numerics_have_all_that_decides_the_tokens_of_a_prompt() -> None:
    own = await numerics_of(Reporting())
    assert own == await numerics_of(Reporting(), max_batch_size=3, tool_format="hermes", speculation=False)
    native = await numerics_of(Reporting(device="cpu (3 threads), native, AVX2"))
    assert native == await numerics_of(Reporting(device="cpu (4 threads), native, AVX-512"), dtype="float32") != own
    others = [await numerics_of(Reporting(), **{name: value}) for name, value in NUMERIC.items()]
    others += [
        await numerics_of(Reporting(numerics="another version of the code")),
        await numerics_of(Reporting(dtype="bfloat16")),
        await numerics_of(Reporting(device="cuda:0 (NVIDIA H200), fused")),
    ]
    assert len({own, *others}) == 1 + len(others)


async def test_ids_that_end_an_answer_are_part_of_the_numerics(tmp_path: Path) -> None:
    folder = copytree(GOLDEN / "mp2", tmp_path / "model")
    own = await numerics_of(Reporting(), ckpt_dir=str(folder))
    template = "{{ messages[0]['content'] }}"
    assert own == await numerics_of(Reporting(), ckpt_dir=str(folder), chat_template=template)
    async with RecoveringService(Reporting, ckpt_dir=str(folder)) as running:
        running.service._stop_ids = running.service._stop_ids | {7}
        assert running.service.numerics != own


def test_each_argument_that_decides_tokens_is_marked() -> None:
    named = set(NUMERIC) | {"model_parallel_size", "device", "dtype", "backend"}
    assert EngineArgs().marked(args.NUMERIC).keys() == named


def test_the_version_of_the_code_changes_with_a_source_and_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copytree(code._ROOT, tmp_path / "llama_core")
    own = code_version(root)
    assert own == code_version()
    text = root / "text" / "chat_llama2.py"
    text.write_text(text.read_text() + "\n")
    assert code_version(root) == own
    for name in ("backends/native/layers/attention.hpp", "backends/sampling.py", "model/share.py", "weights/loader.py"):
        source = root / name
        source.write_text(source.read_text() + "\n")
        assert code_version(root) != own
        own = code_version(root)
    monkeypatch.setattr(code, "version", lambda library: "another version")
    assert code_version(root) != own


async def test_the_digest_of_a_tokenizer_is_not_that_of_its_packing_or_template() -> None:
    config: dict[str, Any] = {"chat_template": "{{ 1 }}", "add_bos_token": True, "eos_token": "</s>"}
    contents = {"tokenizer.json": b"{}", "tokenizer_config.json": json.dumps(config).encode()}
    heads = {f"tokenizer/{name}": PackedFile(len(head), head) for name, head in contents.items()}
    files = ModelFiles(heads, "tokenizer/tokenizer.json", "checkpoint", ("auto", None, "auto"), 100, 128)
    own = files.tokenizer_digest

    def with_file(name: str, head: bytes) -> ModelFiles:
        return msgspec.structs.replace(files, files=files.files | {name: PackedFile(len(head), head)})

    def with_config(**changes: Any) -> ModelFiles:
        return with_file("tokenizer/tokenizer_config.json", json.dumps(config | changes).encode())

    same = [
        msgspec.structs.replace(files, options=("llama2", None, "hermes")),
        with_file("checkpoint/one_more.json", b"{}"),
        with_config(chat_template="{{ messages }}"),
    ]
    assert [other.digest != files.digest for other in same] == [True] * 3
    assert {other.tokenizer_digest for other in same} == {own}
    others = [
        with_file("tokenizer/tokenizer.json", b"{ }"),
        with_config(add_bos_token=False),
        msgspec.structs.replace(files, vocab_size=129),
    ]
    assert own not in {other.tokenizer_digest for other in others}


async def begin(fleet: FleetOfEngines) -> Any:
    (stream,) = await fleet.submit(PROMPT, LONG)
    await until(lambda: stream.sequence.length > len(PROMPT) + 4)
    return stream


async def test_a_stream_moves_to_an_engine_with_other_templates() -> None:
    async with FleetOfEngines(Reporting) as fleet:
        first = await fleet.start()
        stream = await begin(fleet)
        first.die()
        await fleet.start(chat_template="{{ messages[0]['content'] }}", tool_format="hermes")
        assert await read(stream) == continuation(PROMPT, 60, steady)


@pytest.mark.parametrize("change", [{"batch_invariant": True}, {"max_lora_rank": 8}])
async def test_a_stream_does_not_move_to_an_engine_with_other_numerics(change: dict[str, Any]) -> None:
    async with FleetOfEngines(Reporting, hold_timeout_s=5) as fleet:
        first = await fleet.start()
        stream = await begin(fleet)
        first.die()
        await fleet.start(**change)
        with pytest.raises(NotReady, match="hold_timeout_s"):
            await read(stream)
