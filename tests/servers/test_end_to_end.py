"""A whole server as a user starts it: HTTP, handle, examples, many streams, a killed rank, and a clean end."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.local.controller_interval import SERVING_S
from llama_core import Llama
from tests.conftest import GOLDEN
from tests.programs import structured_output
from tests.support import http
from tests.support.programs import REPOSITORY, environment
from tests.support.raw_http import COMPLETIONS, connect, message
from tests.support.server import Server, is_idle, num_generated
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.timeout(600)

# Ray guards its cluster by a token in the user's home. With an explicit address the token must be enabled.
WITH_TOKEN = {"RAY_AUTH_MODE": "token"}

READ_AFTER_S = 15.0  # half of the time after which a client that reads nothing is disconnected

# Lets a process run for a fifth of the time only.
# Stops a process four times as long as it ran: a throttle that is itself scheduled late must not let it run at full speed.
THROTTLE = """
import os, signal, time
ran = 0.002
while True:
    os.kill({pid}, signal.SIGSTOP); time.sleep(min(4 * ran, 0.25))
    begin = time.monotonic()
    os.kill({pid}, signal.SIGCONT); time.sleep(0.002)
    ran = time.monotonic() - begin
"""


@pytest.fixture(scope="module")
def in_process() -> Llama:
    return Llama.build(GOLDEN / "mp2", GOLDEN / "mp2" / "tokenizer.model", 160, 8, dtype="float32", device="cpu")


def client(server: Server, **changes: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, **changes)


def run(command: list[str], env: dict[str, str] | None = None, timeout_s: float = 240.0) -> str:
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


# The golden model by plain `serve run`: the tokens of the reference, as in process.


def test_http_gives_the_tokens_of_the_reference(plain: Server, golden: dict[str, Any]) -> None:
    api = client(plain)
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
    api = client(plain)
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
    out = run([sys.executable, "-c", HANDLE, address_of(plain)], WITH_TOKEN)
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


def address_of(server: Server) -> str:
    """The Ray address of a server's own cluster, from the command line of its raylet."""
    for pid in server.processes():
        words: list[str] = []
        with contextlib.suppress(OSError):  # it has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        for word in words:
            if word.startswith("--gcs-address="):
                return word.removeprefix("--gcs-address=")
    raise AssertionError("the server's cluster was not found")


def test_ray_metrics_have_the_documented_names(plain: Server) -> None:
    client(plain).completions.create(model="golden", prompt="hi", max_tokens=5, temperature=0)
    text = http.get(f"{plain.url}/metrics").text
    for name in (
        "tokens_generated_per_second", "prefill_time_ms", "time_per_decoding_step_ms", "gpu_memory_used_bytes",
        "cuda_oom_errors_count", "invalid_dialog_assertions_count",
    ):  # fmt: skip
        assert f"# HELP {name} " in text
    assert "time_per_decoding_step_ms_count 0.0" not in text


# Both servers.


@pytest.mark.parametrize("server", ["demo", "plain"], ids=["through HAProxy", "through Serve's proxy"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_disconnected_client_frees_its_sequence(server: str, stream: bool, request: pytest.FixtureRequest) -> None:
    running: Server = request.getfixturevalue(server)
    limit = running.get("/v1/models")[1]["data"][0]["max_model_len"] - 20
    body = {"prompt": "Once upon a time", "max_tokens": limit, "ignore_eos": True, "temperature": 1.5, "stream": stream}

    def num_generated_without_client() -> float:
        """Tokens that the server generates for a client that leaves at once."""
        before = num_generated(running)
        with httpx.Client() as leaving:
            if stream:
                with leaving.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
            else:
                with contextlib.suppress(httpx.ReadTimeout):  # a client that pauses may get the whole answer
                    leaving.post(f"{running.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.02))
        wait_until("the server is idle", lambda: is_idle(running))
        return num_generated(running) - before

    # On a busy machine the server may be done before it can notice, but not each time.
    counts = [num_generated_without_client() for _ in range(3)]
    assert min(counts) < limit * 0.75, f"{counts} tokens of {limit} were generated without a client"


# In each run, test_chaos.py and test_logs_and_traces.py kill ranks under live streams.
@pytest.mark.full
@pytest.mark.parametrize("server", ["plain", "demo"], ids=["through Serve's proxy", "through HAProxy"])
def test_live_streams_lose_no_token_when_a_rank_is_killed(server: str, request: pytest.FixtureRequest) -> None:
    running: Server = request.getfixturevalue(server)
    ranks = running.get("/props")[1]["ranks"]
    model = running.get("/v1/models")[1]["data"][0]
    assert len(ranks) == 2

    async def stream(api: openai.AsyncOpenAI, number: int, began: asyncio.Event) -> tuple[str, str | None]:
        body: dict[str, Any] = {"model": model["id"], "prompt": [1, 5 + number], "stream": True, "seed": number}
        body |= {"temperature": 0.8 * (number % 2), "max_tokens": min(400, model["max_model_len"] - 8)}
        text, reason = "", None
        async for event in await api.completions.create(**body, extra_body={"ignore_eos": True}):
            began.set()
            for choice in event.choices:
                text, reason = text + choice.text, choice.finish_reason or reason
        return text, reason

    async def all_streams(*, kill: bool) -> list[tuple[str, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=180) as api:
            began = [asyncio.Event() for _ in range(12)]
            streams = [asyncio.create_task(stream(api, number, event)) for number, event in enumerate(began)]
            if kill:
                await asyncio.gather(*(event.wait() for event in began))
                os.kill(ranks[1]["pid"], signal.SIGKILL)
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(all_streams(kill=False))
    assert {reason for _, reason in undisturbed} == {"length"}
    replica = _pids(running, "ServeReplica")
    assert asyncio.run(all_streams(kill=True)) == undisturbed
    wait_until("the next group of ranks serves", lambda: running.get("/props")[1].get("epoch") == 1)
    running.wait_ready()
    props = running.get("/props")[1]
    assert props["epoch"] == 1 and props["phase"] == "ready"
    assert _pids(running, "ServeReplica") == replica, "the replica keeps running"
    assert not any(rank["pid"] in running.processes() for rank in ranks), "no rank of the dead group is left"


def _pids(running: Server, name: str) -> set[int]:
    return {pid for pid, command in running.processes().items() if name in command}


# The last test of the first server ends it here, because an idle server takes an eighth of a core.


def test_sigterm_of_serve_run_leaves_no_process(plain: Server) -> None:
    """The context `served` also ends a server by SIGTERM and fails if a process is left."""
    assert len(plain.processes()) > 5
    plain.process.send_signal(signal.SIGTERM)
    plain.process.wait(180)
    assert plain.wait_gone() == {}
    assert plain.get("/health")[0] == 0


# The demo model by `make serve`'s command.


def test_the_commands_of_the_banner_work_when_pasted(demo: Server) -> None:
    wait_until("the banner is printed", lambda: "is ready at" in demo.output())
    text = demo.output()
    assert (
        f"is ready at {demo.url}" in text
        and "ranks    2: each on cpu" in text
        and f"bind     127.0.0.1:{demo.port}" in text
    )
    assert "auth     off" in text
    lines = [line.strip() for line in text.splitlines()]
    curl = next(line for line in lines if line.startswith("curl "))
    assert "demo model" in json.loads(run(shlex.split(curl)))["choices"][0]["message"]["content"]
    python = next(line for line in lines if " -c 'import openai" in line)
    assert "demo model" in run(shlex.split(python))


def test_the_terminal_shows_one_line_a_phase_and_the_banner(demo: Server) -> None:
    wait_until("the banner is printed", lambda: "Who are you?" in demo.terminal.read_text())
    before, _, after = demo.terminal.read_text().partition("Llama on Ray is ready")
    lines = [line for line in before.splitlines() if line.strip()]
    phases = [line for line in lines if re.match(r" +[\d.]+ s  ", line)]
    # On a busy machine a rank may warn that no core is free: an event, as after the banner.
    events = [line for line in lines if re.match(r"  \d\d:\d\d:\d\d (WARNING|ERROR) (rank \d|replica|Serve): ", line)]
    assert 4 <= len(phases) <= 8 and len(phases) + len(events) == len(lines), before
    (log,) = re.findall(r"log +(\S+\.log)", after)
    logged = Path(log).read_text()
    assert "Adding 1 replica" in logged and "HAProxy started" in logged and "Llama on Ray is ready" in logged


INTERVAL = """
import sys, time
import ray

def interval(controller):
    import ray.serve._private.controller as loop
    return loop.CONTROL_LOOP_INTERVAL_S

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
deadline = time.monotonic() + 60
while (seen := ray.get(controller.__ray_call__.remote(interval))) != float(sys.argv[2]) and time.monotonic() < deadline:
    time.sleep(0.2)
print("SEEN", seen)
"""


def test_nothing_listens_beyond_loopback(demo: Server) -> None:
    """HTTP, HAProxy's statistics, Ray's processes, Serve's gRPC, the ranks' store."""
    http.post(f"{demo.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=30).raise_for_status()
    listening = demo.listening()
    commands = " ".join(listening.values())
    assert all(name in commands for name in ("gcs_server", "raylet", "haproxy", "ServeReplica", "RankWorker")), commands
    # 127.0.0.1 as an IPv4 and as an IPv6 address, as the kernel writes them.
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:")
    assert {at: command for at, command in listening.items() if not at.startswith(loopback)} == {}


def test_serves_control_loop_slows_down_once_the_server_is_ready(demo: Server) -> None:
    wait_until("the banner is printed", lambda: "is ready at" in demo.output())
    # The command changes the interval after it has printed the banner.
    command = [sys.executable, "-c", INTERVAL, address_of(demo), str(SERVING_S)]
    assert f"SEEN {SERVING_S}\n" in run(command, WITH_TOKEN)


def test_a_request_timeout_is_answered_with_our_error_not_serves(demo: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 1.5}
    url, header = f"{demo.url}/v1/completions", "x-request-timeout-seconds"
    answer = http.post(url, json=body, headers={header: "0.05"})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded", answer.text
    # The first token must come within this time, the last of 61,440 must not. A busy machine may need longer for the first.
    for seconds in (2, 4, 8):
        answer = http.post(url, json=body | {"n": 128, "stream": True}, headers={header: str(seconds)})
        if answer.status_code == 200:
            break
    assert answer.status_code == 200, answer.text
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "deadline_exceeded" in events[-1] and "[DONE]" not in answer.text


@pytest.mark.parametrize("name", [b"x-request-timeout-seconds", b"x-request-id", b"x-request-disconnect-disabled"])
def test_a_header_that_is_not_utf8_is_no_server_error(demo: Server, name: bytes) -> None:
    answer = http.post(
        f"{demo.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=[(name, b"caf\xe9")]
    )
    if b"timeout" in name:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name.decode(), answer.text
    else:
        assert answer.status_code == 200, answer.text


def test_thirty_two_simultaneous_streams_are_complete_and_correct(demo: Server) -> None:
    prompts = [
        f"Tell me a story about a {animal}." for animal in ("fox", "cat", "dog", "frog", "crow", "pig", "bear", "duck")
    ]

    async def chat(api: openai.AsyncOpenAI, i: int, stream: bool) -> tuple[str, str]:
        request: dict[str, Any] = {
            "model": "llama-demo",
            "messages": [{"role": "user", "content": prompts[i % 8]}],
            "temperature": 0.8,
            "seed": i,
            "max_tokens": 100,
        }
        if not stream:
            answer = await api.chat.completions.create(**request)
            return answer.choices[0].message.content or "", answer.choices[0].finish_reason
        text, reason = "", ""
        async for chunk in await api.chat.completions.create(**request, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async def all_at_once() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0, timeout=120) as api:
            streamed = await asyncio.gather(*(chat(api, i, True) for i in range(32)))
            return streamed, await asyncio.gather(*(chat(api, i, False) for i in range(32)))

    streamed, whole = asyncio.run(all_at_once())
    assert all(text.strip() and "\ufffd" not in text for text, _ in streamed)
    assert {reason for _, reason in streamed} <= {"stop", "length"}
    assert len({text for text, _ in streamed}) >= 30
    wait_until("no block is in use", partial(is_idle, demo))
    # The model is bfloat16, where the batch may round differently; most texts must agree all the same.
    assert sum(a == b for a, b in zip(streamed, whole, strict=True)) >= 16


async def test_answers_follow_their_schemas_and_leave_other_texts_as_they_are(demo: Server) -> None:
    found = await structured_output.run(demo.url, num_schemas=20, concurrency=16)
    assert found["faults"] == []
    assert found["counts"]["bounded: stop"] == 2 * 16


# In each run, `test_difficult_clients.py` disconnects streams and waiting requests beside others, which end whole.
@pytest.mark.full
def test_cancelling_half_of_the_streams_frees_their_blocks_and_the_others_complete(demo: Server) -> None:
    async def half() -> tuple[int, dict[str, Any], list[str]]:
        """The requests that ran before 16 of 32 streams were closed, the state after that, and the texts of the others."""
        api = openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0, timeout=120)
        # Sampled, so that few drafts are accepted; else the engine would finish before half of the streams are closed.
        request: dict[str, Any] = {"model": "llama-demo", "max_tokens": 480, "temperature": 1.5, "stream": True}
        ask = partial(api.completions.create, prompt="Once upon a time", extra_body={"ignore_eos": True}, **request)
        streams: list[Any] = await asyncio.gather(*(ask(seed=seed) for seed in range(32)))
        before = (await asyncio.to_thread(demo.get, "/props"))[1]
        for stream in streams[::2]:
            await stream.close()

        async def with_half() -> dict[str, Any] | None:
            now = (await asyncio.to_thread(demo.get, "/props"))[1]
            return now if now["requests_running"] <= 16 else None

        after = await until("half of the requests run", with_half, pause_s=0)

        async def rest(stream: Any) -> str:
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(rest(stream) for stream in streams[1::2]))
        await api.close()
        return before["requests_running"], after, texts

    for _ in range(20):  # on a busy machine streams may end before this client has closed half of them
        num_before, after, texts = asyncio.run(half())
        if (num_before, after["requests_running"]) == (32, 16):
            break
    assert (num_before, after["requests_running"]) == (32, 16)
    assert after["blocks_used"] > 0
    assert len(texts) == 16 and all(len(text) > 100 for text in texts)
    wait_until("no block is in use", partial(is_idle, demo))


def test_the_programs_in_the_documents_run(demo: Server) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    pages = readme + (REPOSITORY / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        # The server of these tests has the demo model.
        here = block.replace("http://127.0.0.1:8000", demo.url).replace("smollm2-135m-instruct", "llama-demo")
        # Other clusters may run, and "auto" would find the youngest.
        here = here.replace('ray.init("auto")', f'ray.init("{address_of(demo)}", log_to_driver=False)')
        assert run([sys.executable, "-c", here], WITH_TOKEN).strip()
    (curl,) = re.findall(r"^    (curl .*?\n.*?)$", readme, re.MULTILINE)
    answer = run(shlex.split(curl.replace("\\\n", " ").replace("http://127.0.0.1:8000", demo.url)))
    assert json.loads(answer)["choices"][0]["message"]["content"].strip()


@pytest.mark.parametrize("example", ["chat_openai.py", "completions_curl.sh", "resume_stream.py"])
def test_the_examples_run(demo: Server, example: str) -> None:
    path = REPOSITORY / "examples" / example
    command = [sys.executable, str(path)] if example.endswith(".py") else ["bash", str(path)]
    assert run([*command, "--base-url", demo.url]).strip()


@pytest.mark.full
def test_an_application_composes_with_the_model(demo: Server) -> None:
    output = run([sys.executable, "examples/compose_app.py", "--address", address_of(demo)], WITH_TOKEN, 100)
    assert re.search(r"'legs': \d.*'mood': '(happy|sad)'", output), output
    assert re.search(r"'legs': \[\d+.*'answer': ", output), output


def test_the_handle_example_runs(demo: Server) -> None:
    example = str(REPOSITORY / "examples" / "handle_from_ray_app.py")
    assert run([sys.executable, example, "--address", address_of(demo)], WITH_TOKEN).strip()


def test_a_rank_that_is_five_times_slower_is_named_and_serving_continues(demo: Server) -> None:
    before = demo.get("/props")[1]
    slow = before["ranks"][1]["pid"]
    body = {
        "model": "llama-demo",
        "prompt": "once upon a time",
        "max_tokens": 50,  # a window of the detector needs 20 steps
        "temperature": 0,
        "ignore_eos": True,
    }
    is_named = is_measured = False
    deadline = time.monotonic() + 240  # the warning needs a slow rank for half a minute
    own_ms: dict[str, float] = {}
    with httpx.Client(base_url=demo.url, timeout=60) as http:
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        throttling = subprocess.Popen([sys.executable, "-c", THROTTLE.format(pid=slow)])
        try:
            while not (is_named and is_measured) and time.monotonic() < deadline:
                assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
                is_named = is_named or "rank 1 is slow, and every step waits for it" in demo.output()
                figures = re.findall(r'^rank_step_ms\{rank="(\d)"\} (\S+)', http.get("/metrics").text, re.MULTILINE)
                own_ms = {rank: float(value) for rank, value in figures}
                is_measured = is_measured or own_ms.get("1", 0.0) > 2 * own_ms.get("0", 1e9)
                time.sleep(1.0)  # a window of the detector lasts longer
        finally:
            throttling.kill()
            throttling.wait()
            os.kill(slow, signal.SIGCONT)
    assert is_named and is_measured, own_ms
    assert demo.get("/props")[1]["epoch"] == before["epoch"]


# The last test of this server, which ends it.


def test_the_first_ctrl_c_completes_live_streams_and_refuses_new_requests(demo: Server) -> None:
    assert demo.get("/ready")[0] == 200

    async def drained() -> tuple[str, dict[str, Any], tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0, timeout=180) as api:
            body: dict[str, Any] = {"model": "llama-demo", "prompt": "Once", "max_tokens": 450, "stream": True}
            live = await api.completions.create(**body, extra_body={"ignore_eos": True})
            await anext(aiter(live))
            demo.process.send_signal(signal.SIGINT)

            async def not_ready() -> tuple[int, dict[str, Any]] | None:
                answer = await asyncio.to_thread(demo.get, "/ready")
                return answer if answer[0] != 200 else None

            ready = await until("the server is not ready any more", not_ready, pause_s=0)
            health = await asyncio.to_thread(demo.get, "/health")
            refused: dict[str, Any] = {}
            try:
                await api.completions.create(model="llama-demo", prompt="x", max_tokens=1)
            except openai.APIStatusError as error:
                refused = {
                    "status": error.status_code,
                    "after": error.response.headers["retry-after"],
                    "code": error.code,
                }
            reason = ""
            async for chunk in live:
                reason = chunk.choices[0].finish_reason or reason
            return reason, refused, ready, health

    # A client that reads late an answer which is larger than the kernel's buffers, but before it would be disconnected.
    late = connect(demo)
    body = {"prompt": "Once", "n": 32, "max_tokens": 450, "logprobs": 20, "ignore_eos": True, "stream": True}
    late.sendall(message(COMPLETIONS, body | {"temperature": 1.5}))
    wait_until("the late client's request runs", lambda: demo.get("/props")[1].get("requests_running"), pause_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        live_has_ended = threading.Event()

        def read_late() -> tuple[int, bytes]:
            live_has_ended.wait(READ_AFTER_S)
            received, last = len(late.recv(2**20)), b""
            while piece := late.recv(2**20):
                received, last = received + len(piece), (last + piece)[-100:]
            return received, last

        reading = pool.submit(read_late)
        try:
            reason, refused, ready, health = asyncio.run(drained())
        finally:
            live_has_ended.set()
        received, last = reading.result()
    assert reason == "length", "the stream is complete"
    assert ready[0] == 503 and ready[1]["phase"] == "draining" and health[0] == 200
    assert received > 2**23 and b"data: [DONE]" in last and last.endswith(b"0\r\n\r\n")
    assert refused["status"] == 503 and refused["code"] == "not_ready" and int(refused["after"]) >= 1
    assert demo.process.wait(180) == 0
    assert "Task ServeController" not in demo.output(), "Ray reports no failure at a normal end"
    assert demo.terminal.read_text().splitlines()[-1] == "Stopped"
    assert demo.wait_gone() == {}
