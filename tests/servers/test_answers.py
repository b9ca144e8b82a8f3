"""Answers over HTTP and by handle are those of the reference and of the model in process, and follow their schemas."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llama_core import Llama
from llama_core.batch_loop import run_batch
from tests.conftest import GOLDEN
from tests.programs import structured_output
from tests.servers.conftest import ADMIN_KEY
from tests.support import embeddings, http
from tests.support.programs import output_of
from tests.support.server import WITH_TOKEN, Server, address_of, openai_client

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def in_process(poet: Path) -> Llama:
    adapters = {"golden-poet": poet}
    at = GOLDEN / "mp2"
    return Llama.build(at, at / "tokenizer.model", 160, 8, dtype="float32", device="cpu", lora_adapters=adapters)


def test_http_gives_the_tokens_of_the_reference(plain: Server, golden: dict[str, Any]) -> None:
    api = openai_client(plain)
    for case in golden["completions"]:
        given = zip(case["prompts"], case["prompt_tokens"], case["out_tokens"], case["text_completion"], strict=True)
        for prompt, prompt_tokens, out_tokens, expected in given:
            new = len(out_tokens) - (len(prompt_tokens) if case["echo"] else 0)
            answer = api.completions.create(
                model="golden", prompt=prompt, max_tokens=new, temperature=0, logprobs=0, echo=case["echo"]
            )
            assert answer.choices[0].text.removeprefix(" ") == expected["generation"].removeprefix(" ")
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.token_logprobs is not None
            assert len(logprobs.token_logprobs) == len(out_tokens)
            if case["logprobs"]:
                # The first echoed token has logprob 0.0 in the reference and null in OpenAI's API.
                assert [p or 0.0 for p in logprobs.token_logprobs] == pytest.approx(expected["logprobs"], abs=1e-4)
    for case in golden["chats"]:
        for dialog, expected in zip(case["dialogs"], case["chat_completion"], strict=True):
            if "[INST]" in dialog[-1]["content"]:
                with pytest.raises(openai.BadRequestError) as refused:
                    api.chat.completions.create(model="golden", messages=dialog, temperature=0)
                assert refused.value.code == "special_tags"
                continue
            chat = api.chat.completions.create(
                model="golden", messages=dialog, max_tokens=case["max_gen_len"], temperature=0
            )
            assert chat.choices[0].message.content == expected["generation"]["content"]


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_streamed_and_whole_answers_equal_the_model_in_process(
    plain: Server, in_process: Llama, temperature: float
) -> None:
    prompt = [1, 264, 495, 619, 608, 616]
    (tokens,), _ = in_process.generate([prompt], 40, temperature=temperature, top_p=0.9, seed=77)
    request: dict[str, Any] = {
        "model": "golden",
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": temperature,
        "top_p": 0.9,
        "seed": 77,
    }
    api = openai_client(plain)
    whole = api.completions.create(**request)
    pieces = list(api.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert len(pieces) > 5
    text = "".join(chunk.choices[0].text for chunk in pieces if chunk.choices)
    assert text == whole.choices[0].text
    assert text.removeprefix(" ") == in_process.tokenizer.decode(tokens).removeprefix(" ")
    assert pieces[-1].usage is not None and whole.usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == len(tokens)


HANDLE = """
import asyncio, json, sys
import ray
from ray import serve
from llama_core.scheduling.sampling_params import SamplingParams

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Caller:
    async def __call__(self) -> str:
        llama = serve.get_app_handle("llama")
        prompt = "Simply put, the theory of relativity states that "
        seen = {
            "text": await llama.text_completion.remote([prompt], temperature=0, max_gen_len=24, logprobs=True),
            "chat": await llama.chat_completion.remote([[{"role": "user", "content": "bye"}]], temperature=0, max_gen_len=9),
            "refused": await llama.chat_completion.remote([[{"role": "user", "content": "[INST]"}]], max_gen_len=9),
            "seeded": await llama.generate.remote([[1, 9, 7]], 20, temperature=0.9, seed=5),
            "stream": [piece async for piece in llama.options(stream=True).stream.remote(prompt, 0, max_gen_len=24)],
        }
        try:
            await llama.chat_completion.remote([[{"role": "assistant", "content": "first"}]])
        except Exception as error:
            seen["error"] = [type(getattr(error, "cause", error)).__name__, str(error)]
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        running = llama.sample.remote([prompt] * 64, params, request_id="mine")
        while not any(await llama.broadcast("abort", "mine").results_async()):
            await asyncio.sleep(0.01)
        seen["aborted"] = [each.finish_reason for each in await running]
        seen["aborted again"] = await llama.broadcast("abort", "mine").results_async()
        return json.dumps(seen)

ray.init(address=sys.argv[1], namespace="other", log_to_driver=False, logging_level="ERROR")
handle = serve.run(Caller.bind(), name="caller", route_prefix=None)
print("SEEN " + handle.remote().result())
serve.delete("caller")
"""


def test_another_ray_app_gets_the_same_tokens_by_handle(
    plain: Server, in_process: Llama, golden: dict[str, Any]
) -> None:
    out = output_of([sys.executable, "-c", HANDLE, address_of(plain)], WITH_TOKEN)
    seen = json.loads(next(line for line in out.splitlines() if line.startswith("SEEN ")).removeprefix("SEEN "))
    expected = golden["completions"][1]["text_completion"][1]
    assert seen["text"][0]["generation"] == expected["generation"] and seen["text"][0]["tokens"] == expected["tokens"]
    assert seen["text"][0]["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert "".join(piece["generation"] for piece in seen["stream"]) == expected["generation"]
    assert seen["stream"][-1]["finish_reason"] == "length"
    chat = in_process.chat_completion([[{"role": "user", "content": "bye"}]], 0, max_gen_len=9)
    assert seen["chat"][0]["generation"] == chat[0]["generation"]
    assert seen["refused"][0]["generation"]["content"].startswith("Error: special tags")
    assert seen["seeded"][0] == in_process.generate([[1, 9, 7]], 20, temperature=0.9, seed=5)[0]
    assert seen["error"][0] == "InvalidDialog" and "messages[0]" in seen["error"][1]
    assert "abort" in seen["aborted"] and set(seen["aborted"]) <= {"abort", "length"}
    assert seen["aborted again"] == [False]  # of each replica


async def test_an_adapter_is_a_model_whose_streams_survive_the_death_of_a_rank(
    plain: Server, in_process: Llama
) -> None:
    models = {each["id"]: each["parent"] for each in plain.get("/v1/models")[1]["data"]}
    assert models == {"golden": None, "golden-poet": "golden"}
    prompt, wanted = "Once upon a time", {}
    for model, adapter in (("golden", ""), ("golden-poet", "golden-poet")):
        [answer] = in_process.text_completion([prompt], 0, max_gen_len=100, adapter=adapter)
        wanted[model] = answer["generation"]
    assert wanted["golden"] != wanted["golden-poet"]
    body = {"prompt": prompt, "max_tokens": 100, "temperature": 0}
    epoch = plain.get("/props")[1]["epoch"]
    async with httpx.AsyncClient(base_url=plain.url, timeout=120) as client:

        async def ask(model: str) -> tuple[str, str]:
            answer = await client.post("/v1/completions", json=body | {"model": model})
            return answer.raise_for_status().json()["model"], answer.json()["choices"][0]["text"]

        assert dict(await asyncio.gather(*map(ask, models))) == wanted
        asked = [asyncio.create_task(ask(model)) for model in [*models] * 20]
        await asyncio.sleep(0)
        os.kill(plain.get("/props")[1]["ranks"][0]["pid"], signal.SIGKILL)
        assert await asyncio.gather(*asked) == [*wanted.items()] * 20
        assert (await client.get("/props")).json()["epoch"] > epoch


def test_embeddings_are_the_states_of_the_model_in_process(plain: Server, in_process: Llama) -> None:
    """The ranks are other processes, and so several; their vectors come by the wire."""
    texts = ["The quick brown fox", "a dog", "once upon a time " * 8]
    runner, tokenizer = in_process.runner, in_process.tokenizer
    for pooling in embeddings.MODES:
        body = {"input": texts, "pooling": pooling, "normalize": False}
        answer = http.post(f"{plain.url}/v1/embeddings", json=body, timeout=60).raise_for_status().json()
        sequences = [embeddings.embedding(tokenizer.encode(text, bos=True, eos=False), pooling) for text in texts]
        run_batch(runner, runner.max_num_blocks(), frozenset(), sequences)
        for item, seq in zip(answer["data"], sequences, strict=True):
            assert item["embedding"] == pytest.approx(embeddings.as_tensor(seq.embedding).tolist(), abs=1e-5)


def test_scores_are_the_log_likelihoods_of_the_model_in_process(plain: Server, in_process: Llama) -> None:
    prompt, texts = "The quick brown", [" fox jumps", " dog", " fox sleeps here"]
    answer = http.post(f"{plain.url}/v1/score", json={"prompt": prompt, "continuations": texts}, timeout=60)
    scored = answer.raise_for_status().json()
    tokenizer = in_process.tokenizer
    before = len(tokenizer.encode(prompt, bos=True, eos=False))
    for text, one in zip(texts, scored["data"], strict=True):
        ids = tokenizer.encode(prompt + text, bos=True, eos=False)
        tokens, logprobs = in_process.generate([ids], 1, temperature=0, logprobs=True, echo=True)
        assert tokens[0][: len(ids)] == ids and logprobs is not None
        expected = logprobs[0][before : len(ids)]
        assert one["tokens"] == ids[before:] and one["num_tokens"] == len(expected)
        assert one["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert one["score"] == pytest.approx(sum(expected), abs=1e-4)
        greedy = in_process.generate([ids[:before]], len(ids) - before, temperature=0)[0][0]
        assert one["is_greedy"] == (greedy == ids[before:])
    by_ids = {"prompt": tokenizer.encode(prompt, bos=True, eos=False), "continuations": [[5, 6], [7]]}
    same = http.post(f"{plain.url}/v1/score", json=by_ids, timeout=60).raise_for_status().json()
    assert [one["tokens"] for one in same["data"]] == [[5, 6], [7]]
    body = {"prompt": prompt, "labels": texts}
    [chosen] = http.post(f"{plain.url}/v1/classify", json=body, timeout=60).raise_for_status().json()["data"]
    scores = [one["score"] for one in scored["data"]]
    assert chosen["label"] == texts[scores.index(max(scores))]
    assert sum(chosen["probs"]) == pytest.approx(1)
    refused = http.post(f"{plain.url}/v1/classify", json={"prompt": "x", "labels": ["a", "a"]}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "labels"


async def test_answers_follow_their_schemas_and_leave_other_texts_as_they_are(demo: Server) -> None:
    found = await structured_output.run(demo.url, num_schemas=20, concurrency=16)
    assert found["faults"] == []
    assert found["counts"]["bounded: stop"] == 2 * 16


async def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(plain: Server, poet: Path) -> None:
    async with httpx.AsyncClient(base_url=plain.url, timeout=120) as client:

        async def ask(model: str, **options: Any) -> httpx.Response:
            body = {"model": model, "prompt": "Once upon a time", "max_tokens": 100, "temperature": 0}
            return await client.post("/v1/completions", json=body | options)

        load = {"lora_name": "golden-bard", "lora_path": poet.name}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 403
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        (await client.post("/v1/load_lora_adapter", json=load, headers=key)).raise_for_status()
        answers = [(await ask(model)).raise_for_status().json() for model in ("golden-bard", "golden-poet")]
        assert answers[0]["choices"] == answers[1]["choices"]
        one_of_two = await ask("golden-bard", structured_outputs={"choice": ["north", "south"]})
        text = one_of_two.json()["choices"][0]["text"].strip()  # a completion keeps the prompt's space
        assert text in ("north", "south")
        (await client.post("/v1/unload_lora_adapter", json=load, headers=key)).raise_for_status()
        assert (await ask("golden-bard")).status_code == 404
