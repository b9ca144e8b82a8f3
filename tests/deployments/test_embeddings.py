"""`/v1/embeddings` as OpenAI's client asks for them, of a model in Qwen3-Embedding's shape, in both forms of a deployment."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

from deployments.engine.interface import Models
from llama_core.backends.parallel import alone
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.text.registry import load_tokenizer
from tests.support import adapters, embeddings, families
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FakeEngineProcess, FleetOfEngines
from tests.support.recovering_service import RecoveringService
from tests.support.scripted_engine import in_process

TEXTS = ["What is the capital of China?", "Explain gravity", "Les élèves naïfs", "a " * 60]
FORMS = ("build_app", "front and engine")


class ModelGroup(FakeGroup):
    """A runner of a real model in the place of fake ranks. `fails`: at the first step that gives an embedding."""

    def __init__(self, folder: Path, *, fails: bool = False, **config: Any) -> None:
        self.runner = embeddings.new_runner(alone("cpu"), str(folder), "native", **config)
        super().__init__(num_blocks=self.runner.max_num_blocks(), block_size=self.runner.config.block_size)
        self.fails = fails

    async def _compute(self, batch: StepInput) -> StepOutput:
        await asyncio.sleep(0)
        output = self.runner.step(batch)
        if self.fails and output.embeddings:
            self.fail()
            await asyncio.Future()
        return output


class Embedder:
    """The model's folder, transformers' model and tokenizer of it, and an adapter."""

    def __init__(self, root: Path) -> None:
        from transformers import AutoTokenizer

        self.folder, self.adapter = root / "embedder", root / "adapter"
        self.model = embeddings.write_embedder(self.folder)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.merged = adapters.write(self.adapter, self.folder, adapters.SHAPES["all"])

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def expected(self, text: str | list[int], pooling: Any = "last", dimensions: int | None = None) -> torch.Tensor:
        ids = self.ids(text) if isinstance(text, str) else text
        pooled = embeddings.of_transformers(self.model, ids, pooling)[:dimensions]
        return torch.nn.functional.normalize(pooled, dim=0)

    @asynccontextmanager
    async def served(self, form: str, **changes: Any) -> AsyncIterator[Models]:
        config: dict[str, Any] = {"max_loras": 1, "max_lora_rank": 16}
        fields: dict[str, Any] = {"ckpt_dir": str(self.folder), "max_seq_len": families.MAX_SEQ_LEN}
        fields |= {"max_batch_size": 8, "max_step_tokens": 23, "lora_adapters": {"tuned": str(self.adapter)}}
        fields |= config | {"model_id": "demo"} | changes

        def make() -> FakeGroup:
            return ModelGroup(self.folder, **config)

        if form == "build_app":
            async with RecoveringService(make, **fields) as service:
                yield service.front
        else:
            async with FleetOfEngines(make) as fleet:
                await fleet.start(**fields)
                yield fleet.fleet


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return Embedder(tmp_path_factory.mktemp("embedders"))


@asynccontextmanager
async def clients(models: Models) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient]]:
    async with in_process(models) as plain:
        yield AsyncOpenAI(api_key="-", base_url="http://127.0.0.1/v1", http_client=plain, max_retries=0), plain


def vectors(answer: Any) -> list[torch.Tensor]:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [torch.tensor(item.embedding) for item in answer.data]


@pytest.mark.parametrize("form", FORMS)
async def test_openais_client_gets_the_vectors_of_transformers(embedder: Embedder, form: str) -> None:
    async with embedder.served(form) as models, clients(models) as (client, plain):
        whole = await client.embeddings.create(model="demo", input=TEXTS)
        for text, vector in zip(TEXTS, vectors(whole), strict=True):
            assert vector == pytest.approx(embedder.expected(text), abs=1e-5)
        num_tokens = sum(len(embedder.ids(text)) for text in TEXTS)
        assert whole.usage.model_dump() == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert (whole.object, whole.model) == ("list", "demo")
        end = embedder.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        assert embedder.ids(TEXTS[1])[-1] == end != embedder.tokenizer.eos_token_id

        for given, n in ((TEXTS[0], 1), ([5, 9, 7], 1), ([[5, 9], [8]], 2)):  # text, ids, lists of ids
            answer = await client.embeddings.create(model="demo", input=given)
            each = given if n > 1 else [given]
            for one, vector in zip(each, vectors(answer), strict=True):
                assert vector == pytest.approx(embedder.expected(one), abs=1e-5)  # type: ignore[arg-type]

        body: dict[str, Any] = {"model": "demo", "input": TEXTS[:2], "encoding_format": "base64"}
        raw = (await plain.post("/v1/embeddings", json=body)).json()["data"]
        packed = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in raw]
        floats = (await plain.post("/v1/embeddings", json=body | {"encoding_format": "float"})).json()["data"]
        assert [vector.tolist() for vector in packed] == [item["embedding"] for item in floats]
        assert [vector.tolist() for vector in packed] == [item.embedding for item in whole.data[:2]], "the same bits"

        short = await client.embeddings.create(model="demo", input=TEXTS[:2], dimensions=10)
        for text, vector in zip(TEXTS[:2], vectors(short), strict=True):
            assert vector == pytest.approx(embedder.expected(text, dimensions=10), abs=1e-5)
        for pooling in embeddings.MODES:
            more = {"pooling": pooling, "normalize": False, "add_special_tokens": False}
            answer = await client.embeddings.create(model="demo", input=TEXTS[:1], extra_body=more)
            ids = embedder.ids(TEXTS[0])[:-1]
            expected = embeddings.of_transformers(embedder.model, ids, pooling)
            assert vectors(answer)[0] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("form", FORMS)
async def test_an_adapters_name_is_the_model(embedder: Embedder, form: str) -> None:
    async with embedder.served(form) as models, clients(models) as (client, _):
        base, tuned = [
            vectors(await client.embeddings.create(model=name, input=TEXTS[:2])) for name in ("demo", "tuned")
        ]
    parameters = dict(embedder.model.named_parameters())
    try:
        for sign, found in ((0, base), (1, tuned)):
            for name, a, b, scale in embedder.merged:
                parameters[name.removeprefix("model.")].data += sign * scale * (b @ a)
            for text, vector in zip(TEXTS[:2], found, strict=True):
                assert vector == pytest.approx(embedder.expected(text), abs=1e-5)
    finally:
        for name, a, b, scale in embedder.merged:
            parameters[name.removeprefix("model.")].data -= scale * (b @ a)


@pytest.mark.parametrize("form", FORMS)
async def test_texts_are_embedded_beside_chats(embedder: Embedder, form: str) -> None:
    async with embedder.served(form) as models, clients(models) as (client, _):

        async def completion(index: int) -> str:
            answer = await client.completions.create(
                model="demo", prompt=TEXTS[index], max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
            )
            return str(answer.choices[0].text)

        apart = [await client.embeddings.create(model="demo", input=text) for text in TEXTS]
        alone_ = [await completion(i) for i in range(3)]
        asked = [client.embeddings.create(model="demo", input=TEXTS * 4) for _ in range(3)]
        *together, first, second, third = await asyncio.gather(*asked, *map(completion, range(3)))
        assert [first, second, third] == alone_
        for answer in together:
            got = [item.embedding for item in answer.data]
            assert got == [one.data[0].embedding for one in apart] * 4


ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": []}, "input", "empty"),
    ({"input": ""}, "input", "empty"),
    ({"input": ["a", ""]}, "input", "empty"),
    ({"input": [[5], []]}, "input", "empty"),
    ({"input": 5}, "input", "string"),
    ({"input": ["a", 5]}, "input", "string"),
    ({"input": [640]}, "input", "token ids must be from 0"),
    ({"input": "a " * 200}, "input", "exceed the configured limit of 128 tokens"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": ["a"] * 300}, "input", "at most 208 texts"),
    ({"input": "a", "dimensions": 65}, "dimensions", "at most 64"),
    ({"input": "a", "dimensions": 0}, "dimensions", "1"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
    ({"input": "a", "pooling": "max"}, "pooling", "mean"),
    ({"input": "a", "normalize": 1}, "normalize", "true or false"),
]


async def test_wrong_requests_are_refused_by_field(embedder: Embedder) -> None:
    async with embedder.served("build_app", max_queue=200) as models, clients(models) as (client, plain):
        for body, param, words in ERRORS:
            answer = await plain.post("/v1/embeddings", json={"model": "demo"} | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (body, error)
            assert words in error["message"], error
        with pytest.raises(BadRequestError):
            await client.embeddings.create(model="demo", input="a", dimensions=70)
        longest = [5] * 128  # as long as the context
        found = vectors(await client.embeddings.create(model="demo", input=longest))
        assert found[0] == pytest.approx(embedder.expected(longest), abs=1e-5)


@pytest.mark.parametrize(
    ("kinds", "flags", "expected"),
    [
        ((), {"mean_tokens": True}, "is missing"),
        (("Pooling",), {"mean_tokens": True}, ("mean", False)),
        (("Pooling", "Normalize"), {"cls_token": True}, ("first", True)),
        (("Pooling", "Normalize"), {"cls_token": True, "mean_tokens": True}, "cls_token and mean_tokens"),
        (("Pooling", "Dense", "Normalize"), {"mean_tokens": True}, "Dense"),
    ],
)
async def test_the_files_of_sentence_transformers_count(
    embedder: Embedder, tmp_path: Path, kinds: tuple[str, ...], flags: dict[str, bool], expected: Any
) -> None:
    for path in embedder.folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "modules.json").unlink()
    embeddings.write_modules(tmp_path, *kinds, **flags)
    async with embedder.served("front and engine", ckpt_dir=str(tmp_path)) as models, clients(models) as (_, plain):
        body = {"model": "demo", "input": "Explain gravity"}
        answer = (await plain.post("/v1/embeddings", json=body)).json()
        if isinstance(expected, str):
            assert answer["error"]["param"] == "pooling" and expected in answer["error"]["message"]
            answer = (await plain.post("/v1/embeddings", json=body | {"pooling": "mean", "normalize": False})).json()
            expected = "mean", False
        pooling, is_normalized = expected
        vector = embeddings.of_transformers(embedder.model, embedder.ids("Explain gravity"), pooling)
        vector = torch.nn.functional.normalize(vector, dim=0) if is_normalized else vector
        assert torch.tensor(answer["data"][0]["embedding"]) == pytest.approx(vector, abs=2e-5)


async def test_an_embedding_whose_engine_dies_is_computed_by_another(embedder: Embedder) -> None:
    made: list[ModelGroup] = []

    def make() -> FakeGroup:
        made.append(ModelGroup(embedder.folder, max_loras=1, max_lora_rank=16))
        return made[-1]

    args: dict[str, Any] = {"ckpt_dir": str(embedder.folder), "max_seq_len": 128, "max_step_tokens": 23}
    async with FleetOfEngines(make) as fleet:
        first: FakeEngineProcess = await fleet.start(**args)
        made[0].go.clear()  # no step of the first engine ends
        async with clients(fleet.fleet) as (client, _):
            asking = asyncio.ensure_future(client.embeddings.create(model="demo", input=TEXTS))
            await until(lambda: len(made[0].steps) > 0)
            await fleet.start(**args)
            first.die()
            found = vectors(await asking)
    assert made[1].steps
    for text, vector in zip(TEXTS, found, strict=True):
        assert vector == pytest.approx(embedder.expected(text), abs=1e-5)


async def test_an_embedding_whose_ranks_fail_is_computed_again(embedder: Embedder) -> None:
    fails = iter([True, False])
    async with (
        RecoveringService(
            lambda: ModelGroup(embedder.folder, fails=next(fails)), ckpt_dir=str(embedder.folder), max_step_tokens=23
        ) as service,
        clients(service.front) as (client, _),
    ):
        found = vectors(await client.embeddings.create(model=service.service.model_id, input=TEXTS[:3]))
        assert service.failures
    for text, vector in zip(TEXTS[:3], found, strict=True):
        assert vector == pytest.approx(embedder.expected(text), abs=1e-5)


def test_tokens_behind_a_text_are_those_of_transformers(embedder: Embedder, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((embedder.folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").symlink_to(embedder.folder / "tokenizer.json")
    for change in ({}, {"add_bos_token": False}, {"add_eos_token": True}, {"add_eos_token": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change))
        ours, theirs = load_tokenizer(tmp_path, probes=False), AutoTokenizer.from_pretrained(tmp_path)
        whole = [*ours.encode("Explain gravity", bos=True, eos=False), *ours.appended]
        assert whole == theirs("Explain gravity")["input_ids"], change
