"""Sizes and lengths in the server's arguments: from YAML, key=value and the environment alike."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from deployments.args import ServerArgs
from deployments.local.config_file import read_config

# Arguments that are whole numbers, but neither sizes nor lengths.
PLAIN_NUMBERS = {"seed"}


def numbers() -> list[str]:
    """The names of all arguments that hold a whole number."""
    found = []
    for name, info in ServerArgs.model_fields.items():
        kinds = [info.annotation, *get_args(info.annotation)]
        kinds += [part for kind in kinds for part in get_args(kind)]
        if int in kinds and name not in PLAIN_NUMBERS:
            found.append(name)
    return found


def test_the_list_of_numbers_has_those_that_everyone_sets() -> None:
    assert {"max_seq_len", "max_batch_size", "kv_cache_bytes", "max_body_bytes", "model_parallel_size"} <= set(
        numbers()
    )


@pytest.mark.parametrize("name", numbers())
def test_every_size_takes_a_unit_from_each_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"applications: [{{name: llama, args: {{{name}: 2Ki}}}}]")
    from_file: dict[str, Any] = read_config(path, ()).content["applications"][0]["args"]
    from_override: dict[str, Any] = read_config(path, [f"{name}=3k"]).content["applications"][0]["args"]
    assert getattr(ServerArgs(**from_file), name) == 2048
    assert getattr(ServerArgs(**from_override), name) == 3000
    monkeypatch.setenv(f"LLAMA_{name.upper()}", "4KiB")
    assert getattr(ServerArgs(), name) == 4096


@pytest.mark.parametrize("value", ["8x", "1.5", "", True, 0, "0k"])
def test_a_bad_size_is_refused_with_the_name_of_its_field(value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        ServerArgs(kv_cache_bytes=value)
    assert [error["loc"] for error in refused.value.errors()] == [("kv_cache_bytes",)]
