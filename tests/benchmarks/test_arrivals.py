"""The question `arrivals`: figures and ratios of loads, and the whole command on two servers without a model."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.aiohttp_client import AiohttpSession
from benchmarks.harness.load import Answer, HttpSession, Session, drive
from benchmarks.harness.workload import Request, spread_batch
from benchmarks.questions.arrivals import Samples, meets_goals, samples_of, summary
from llama_core.errors import NonFiniteLogits
from tests.support.scripted_engine import MODEL_ID, FakeEngine, serve


def test_percentiles_are_of_all_rounds_and_ratios_are_to_the_last_contender() -> None:
    ours, theirs = Samples(), Samples()
    ours.add(Samples([10.0], [2.0], [100.0]))
    ours.add(Samples([30.0], [4.0], [300.0]))
    theirs.add(Samples([40.0, 40.0], [6.0], [100.0]))
    (result,) = summary({"2 req/s": {"ours": ours, "theirs": theirs}}).values()
    assert result["contenders"]["ours"]["ttft_p50_ms"] == 20.0
    assert result["ratios"] == {
        "ours": {
            "ttft_p50_ms": 0.5,
            "ttft_p99_ms": pytest.approx(29.8 / 40),
            "per_token_p50_ms": 0.5,
            "per_token_p99_ms": pytest.approx(3.98 / 6),
            "output_tok_s": 2.0,
        }
    }
    assert meets_goals(result["ratios"]["ours"])
    assert not meets_goals(result["ratios"]["ours"] | {"ttft_p99_ms": 1.01})
    assert not meets_goals(result["ratios"]["ours"] | {"per_token_p50_ms": 0.76})


def test_a_load_without_answers_or_without_time_between_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no request was answered: .*refused"):
        Samples(failed=["refused"]).figures()
    instant = {"a": Samples([1.0], [1.0], [1.0]), "b": Samples([1.0], [0.0], [1.0])}
    with pytest.raises(ValueError, match="per_token_p50_ms is 0"):
        summary({"2 req/s": instant})


def test_a_result_of_vllm_bench_serve_gives_times_of_each_request() -> None:
    result = {
        "output_throughput": 50.0,
        "ttfts": [0.1, 0.0, 0.2],
        "latencies": [0.5, 0.0, 0.2],
        "output_lens": [5, 0, 1],
        "errors": ["", "Traceback\nValueError: no\n", ""],
    }
    samples = samples_of(result)
    assert samples.ttft_ms == [100.0, 200.0]
    assert samples.per_token_ms == [pytest.approx(100.0)], "a single token has no time after the first"
    assert (samples.tok_s, samples.failed) == ([50.0], ["ValueError: no"])


def test_lengths_lie_within_the_spread_and_depend_on_the_seed_alone() -> None:
    batch = spread_batch(200, 128, 64, 0.5, 500, seed=3)
    assert batch == spread_batch(200, 128, 64, 0.5, 500, seed=3) != spread_batch(200, 128, 64, 0.5, 500, seed=4)
    assert {len(request.prompt) // 64 for request in batch} == {1, 2, 3}
    assert min(len(request.prompt) for request in batch) >= 64 and max(len(request.prompt) for request in batch) <= 192
    assert min(request.num_output for request in batch) >= 32 and max(request.num_output for request in batch) <= 96


@pytest.mark.parametrize("kind", [HttpSession, AiohttpSession])
async def test_both_clients_see_the_same_tokens_and_errors(kind: type[HttpSession] | type[AiohttpSession]) -> None:
    engine = FakeEngine("One two three.")
    engine.fail_at = (2, NonFiniteLogits("not finite"))
    engine.fail_prompt = lambda stream: len(stream.prompt) == 7
    with serve(engine) as served:
        sessions: list[Session] = [kind(served.url, MODEL_ID) for _ in range(2)]
        good = await drive(sessions, [Request([1, 5, 6], 8)] * 6)
        bad = await drive(sessions[:1], [Request([1, 5, 6, 7, 8, 9, 10], 8), Request([], 8)])
        for session in sessions:
            await session.close()
        unknown: Session = kind(served.url, "another model")
        refused = await drive([unknown], [Request([1, 5], 8)])
        await unknown.close()
    assert [(answer.num_tokens, len(answer.token_times), answer.error) for answer in good.answers] == [(8, 8, None)] * 6
    assert all(answer.began_s < answer.token_times[0] <= answer.ended_s for answer in good.answers)
    failed, empty = bad.answers
    assert failed.error is not None and "not finite" in failed.error
    assert empty.error is not None and empty.error.startswith("HTTP 400")
    assert [(type(answer), answer.status) for answer in refused.answers] == [(Answer, 404)]


# Replaces `vllm bench serve`: writes a result for the requested load.
BENCH = """#!/usr/bin/env python3
import json, pathlib, sys
words = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1:4] == ["-m", "benchmarks.peers.vllm_bench", "serve"] and words["--request-rate"] == "50.0"
count, path = int(words["--num-prompts"]), pathlib.Path(words["--result-dir"], words["--result-filename"])
columns = {"ttfts": [0.01] * count, "latencies": [0.05] * count, "output_lens": [5] * count, "errors": [""] * count}
path.write_text(json.dumps({"output_throughput": 9.0} | columns))
"""


def test_the_command_compares_two_servers_in_open_and_closed_loops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, peers = tmp_path / "bench", tmp_path / "peers.toml"
    bench.write_text(BENCH)
    bench.chmod(0o755)
    server = f'["{sys.executable}", "-m", "tests.benchmarks.fake_server", "{{port}}"]'
    contenders = "".join(
        f'[contenders.{name}]\nserver = {server}\nserved_model = "{MODEL_ID}"\n' for name in ("one", "two")
    )
    peers.write_text(f'[models.demo]\nhf = "nowhere"\nvocab_size = "200"\n{contenders}')
    asked = ["--contenders", "one", "two", "--peers", str(peers), "--bench-python", str(bench), "--patience-s", "0"]
    load = ["--rates", "50", "--requests", "3", "--clients", "2", "--per-client", "2", "--prompt", "8", "--output", "6"]
    main(["arrivals", *asked, *load, "--rounds", "2", "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["loads"].keys() == {"50 req/s", "2 clients, light", "2 clients, aiohttp"}
    for name, load_result in result["loads"].items():
        for contender in ("one", "two"):
            figures = load_result["contenders"][contender]
            assert (figures["requests"], figures["failed"]) == (4 if "req/s" in name else 8, 0)
        assert load_result["ratios"]["one"]["ttft_p50_ms"] > 0
    assert result["loads"]["50 req/s"]["ratios"]["one"] == dict.fromkeys(load_result["ratios"]["one"], 1.0)
    assert "Ratios to the last contender" in capsys.readouterr().out
