"""The calls that load and unload adapters: who may make them, and what they pass on."""

from typing import Any

import httpx
import pytest

from deployments.api_keys import ApiKeys, digests_of
from llama_core.errors import InvalidParameter
from tests.support.scripted_engine import MODEL_ID, FakeEngine, assert_error, in_process

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "poet", "lora_path": "poets/new"}
ADMIN = {"Authorization": "Bearer admin"}


class Loader:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def load(self, name: str, folder: str, base: str | None, *, replaces: bool) -> None:
        if folder == "missing":
            raise InvalidParameter("lora_path: there is no such folder", param="lora_path")
        self.calls.append((name, folder, base, replaces))

    async def unload(self, name: str, base: str | None) -> bool:
        self.calls.append((name, base))
        return name == "poet"


def client(loader: Loader | None, keys: str = "") -> httpx.AsyncClient:
    return in_process(
        FakeEngine(), keys=ApiKeys(digests_of(keys)), admin_keys=ApiKeys(digests_of("admin")), loader=loader
    )


async def test_an_admin_key_loads_and_unloads() -> None:
    loader = Loader()
    async with client(loader) as http:
        for body in (BODY, BODY | {"load_inplace": True, "base_model_name": "demo"}):
            assert (await http.post(LOAD, json=body, headers=ADMIN)).status_code == 200
        assert (await http.post(UNLOAD, json={"lora_name": "poet"}, headers=ADMIN)).status_code == 200
        unknown = await http.post(UNLOAD, json={"lora_name": "clerk"}, headers=ADMIN)
        assert_error(unknown, 404, "model_not_found")
    assert loader.calls == [
        ("poet", "poets/new", None, False),
        ("poet", "poets/new", "demo", True),
        ("poet", None),
        ("clerk", None),
    ]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize(
    ("keys", "key", "status", "code"),
    [
        ("", None, 403, "admin_key_required"),
        ("", "wrong", 403, "admin_key_required"),
        ("user", "user", 403, "admin_key_required"),
        ("user", None, 401, "invalid_api_key"),
    ],
)
async def test_another_key_or_none_changes_nothing(
    path: str, keys: str, key: str | None, status: int, code: str
) -> None:
    loader = Loader()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with client(loader, keys) as http:
        assert_error(await http.post(path, json=BODY, headers=headers), status, code)
    assert not loader.calls


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize(
    ("change", "status"),
    [("{}%0A", 400), ("{}%0D%0A", 400), ("{}%00", 400), ("{}/", 404), ("/{}", 404), ("{}%20", 404), ("{}?", 403)],
)
async def test_no_spelling_of_the_path_avoids_the_rule_of_its_route(path: str, change: str, status: int) -> None:
    """Patterns that end with `$` match before a line feed too: the rule belongs to the route that answers."""
    loader = Loader()
    async with client(loader, "user") as http:
        answer = await http.post(change.format(path), json=BODY, headers={"Authorization": "Bearer user"})
    assert answer.status_code == status and not loader.calls
    error = answer.json()["error"]
    assert error["code"] == {400: "invalid_parameter", 403: "admin_key_required", 404: "not_found"}[status]


async def test_an_admin_key_is_an_api_key() -> None:
    body = {"model": MODEL_ID, "prompt": "hi", "max_tokens": 3}
    async with client(None, "user") as http:
        assert (await http.post("/v1/completions", json=body, headers=ADMIN)).status_code == 200
        assert_error(await http.post(LOAD, json=BODY, headers=ADMIN), 404, "not_found")


@pytest.mark.parametrize(
    ("change", "param"),
    [({"lora_path": "missing"}, "lora_path"), ({"lora_name": ""}, "lora_name"), ({"lora_path": None}, "lora_path")],
)
async def test_what_cannot_be_loaded_is_named(change: dict[str, Any], param: str) -> None:
    async with client(Loader()) as http:
        answer = await http.post(LOAD, json=BODY | change, headers=ADMIN)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
