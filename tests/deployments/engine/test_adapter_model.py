"""Adapters among an engine's models, and the arguments that name them."""

from pathlib import Path
from typing import cast

import pytest

from deployments.args import EngineArgs, ServerArgs
from deployments.engine.adapter_model import AdapterModels
from deployments.engine.interface import Engine, TokenStream
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import ConfigError
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support import adapters
from tests.support.hugging_face import CONFIGS, read
from tests.support.scripted_engine import FakeEngine


class Submitted(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[str] = []

    async def submit(  # type: ignore[override]
        self, request: Request, *, is_timed: bool = False, numerics: str = ""
    ) -> list[TokenStream]:
        self.adapters.append(request.adapter)
        return []


async def test_a_request_to_an_adapters_model_has_the_adapter() -> None:
    engine = Submitted()
    models = AdapterModels(cast(Engine, engine), {engine.model_id: "0", "poet": "digest"})
    assert list(models) == [engine.model_id, "poet"] and len(models) == 2 and "nobody" not in models
    poet = models["poet"]
    for each in (poet, models[engine.model_id]):
        await each.submit(Request([[1]], [SamplingParams()]))
    assert engine.adapters == ["digest", ""]
    assert (poet.model_id, poet.parent, poet.max_seq_len) == ("poet", engine.model_id, engine.max_seq_len)


def test_adapters_are_named_in_text_as_in_a_mapping() -> None:
    folders = {"poet": "/a/b=c", "clerk": "d"}
    for given in (folders, "poet=/a/b=c, clerk=d"):
        args = ServerArgs.model_validate({"lora_adapters": given})
        assert args.lora_adapters == folders


def test_an_adapter_of_a_base_with_another_name_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    for base in ("org/Other-7B", "org/Poet-7B", ""):
        adapters.write(
            tmp_path / str(len(base)), GOLDEN / "mp1", given | ({"base_model_name_or_path": base} if base else {})
        )
    args = EngineArgs(model_id="poet-7b", lora_adapters={str(n): str(tmp_path / str(n)) for n in (12, 11, 0)})
    args.open_adapters(open_checkpoint(GOLDEN / "mp1").model_config(32000))
    assert ["'Other-7B'" in record.message for record in caplog.records] == [True]


def test_an_adapter_cannot_have_the_name_of_its_base(tmp_path: Path) -> None:
    args = EngineArgs(model_id="poet", lora_adapters={"poet": str(tmp_path)})
    with pytest.raises(ConfigError, match="'poet' is the base's model_id"):
        args.open_adapters(read(CONFIGS["llama2"]))
