"""Adapters among an engine's models, and the arguments that name them."""

from pathlib import Path
from typing import cast

import pytest

from deployments.args import EngineArgs, ServerArgs
from deployments.engine.adapter_model import AdapterModel
from deployments.engine.interface import Engine, TokenStream
from llama_core.errors import ConfigError
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.hugging_face import CONFIGS, read
from tests.support.scripted_engine import FakeEngine


class Submitted(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[str] = []

    async def submit(self, request: Request, *, is_timed: bool = False) -> list[TokenStream]:  # type: ignore[override]
        self.adapters.append(request.adapter)
        return []


async def test_a_request_to_an_adapters_model_has_the_adapter() -> None:
    engine = Submitted()
    poet = AdapterModel(cast(Engine, engine), "poet", "digest")
    for each in (poet, engine):
        await each.submit(Request([[1]], [SamplingParams()]))
    assert engine.adapters == ["digest", ""]
    assert (poet.model_id, poet.parent, poet.max_seq_len) == ("poet", engine.model_id, engine.max_seq_len)


def test_adapters_are_named_in_text_as_in_a_mapping() -> None:
    folders = {"poet": "/a/b=c", "clerk": "d"}
    for given in (folders, "poet=/a/b=c, clerk=d"):
        args = ServerArgs.model_validate({"lora_adapters": given})
        assert args.lora_adapters == folders


def test_an_adapter_cannot_have_the_name_of_its_base(tmp_path: Path) -> None:
    args = EngineArgs(model_id="poet", lora_adapters={"poet": str(tmp_path)})
    with pytest.raises(ConfigError, match="'poet' is the base's model_id"):
        args.open_adapters(read(CONFIGS["llama2"]))
