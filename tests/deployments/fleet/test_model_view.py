"""Adapters among an engine's models, and the arguments that name them."""

from pathlib import Path
from typing import Any, cast

import pytest

from deployments.args import EngineArgs, ServerArgs
from deployments.engine.interface import EngineState, SamplingDefaults, TokenStream
from deployments.fleet.model_view import EngineText, ModelViews, Submits
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import ConfigError
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.model_text import TextOptions, open_model_text
from tests.conftest import GOLDEN
from tests.support import adapters
from tests.support.hugging_face import CONFIGS, read
from tests.support.loop_engine import TOKENIZER

OPTIONS = TextOptions("llama2", None, "auto")


class OneModel:
    """Notes the adapters of requests."""

    model_id = "base"
    latest = EngineState(max_seq_len=64)
    text = EngineText(open_model_text(TOKENIZER, TOKENIZER.n_words, GOLDEN / "mp1", OPTIONS), "", SamplingDefaults())
    next_seed = cache_scope = check_capacity = describe = readmit = served_numerics = None

    def __init__(self) -> None:
        self.adapters: list[str] = []

    async def submit(self, request: Request, **_: Any) -> list[TokenStream]:
        self.adapters.append(request.terms.adapter)
        return []


async def test_a_request_to_an_adapters_model_has_the_adapter() -> None:
    model = OneModel()
    views = ModelViews(cast(Submits, model), {"base": "0", "poet": "1", "cook": "2"})
    assert list(views) == ["base", "poet", "cook"] and len(views) == 3 and "nobody" not in views
    for name in views:
        await views[name].submit(Request([[1]], [SamplingParams()]))
    assert model.adapters == ["", "1", "2"]
    assert [(view.model_id, view.parent) for view in views.values()] == [
        ("base", None),
        ("poet", "base"),
        ("cook", "base"),
    ]
    assert {view.max_seq_len for view in views.values()} == {64}


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
