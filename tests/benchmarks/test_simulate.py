"""The simulator of a fleet, in seconds: its clock, what it counts, traces and generators."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from ray.serve.config import AutoscalingConfig

from benchmarks.simulate.autoscale import Autoscaler, misses_at, policy_of
from benchmarks.simulate.command import engines_for
from benchmarks.simulate.generators import GENERATORS
from benchmarks.simulate.live import fitted, live
from benchmarks.simulate.run import CHOOSERS, POOLED, Outcome, Setting, run
from benchmarks.simulate.traces import read
from benchmarks.simulate.workload import OF_ANSWER, Call, with_later
from deployments.fleet.routing import POLICIES
from llama_core.scheduling.step_costs import StepShape
from tests.benchmarks.test_commands import result_of
from tests.support.modelled_fleet import DELAY_S, Costs

COSTS = Costs(40.0, 1.0, 2.0)
SETTING = Setting("expected_time", COSTS, num_blocks=1500, block_size=16, max_batch_size=16)
ONE = replace(SETTING, speeds=[1.0])
MIXED = GENERATORS["mixed"](Random(1), 7.0, 15.0)


def without_wall(outcome: Outcome) -> Outcome:
    outcome.wall = 0.0
    return outcome


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    outcome = run([Call(0.0, [(5, 100)], 11)], ONE)
    assert outcome.ttft == pytest.approx([0.140], abs=10 * DELAY_S)
    assert outcome.latency == pytest.approx([0.140 + 10 * 0.042], abs=10 * DELAY_S)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (100, 0, 11)
    assert run([Call(0.0, [(5, 100)], 11)], replace(ONE, speeds=[2.0])).ttft == pytest.approx([0.070], abs=10 * DELAY_S)


def test_equal_seeds_replay_exactly() -> None:
    setting = replace(SETTING, num_fronts=4)
    first = without_wall(run(MIXED, setting))
    assert first == without_wall(run(MIXED, setting))
    assert first.ttft != run(GENERATORS["mixed"](Random(2), 7.0, 15.0), setting).ttft
    assert len(first.ttft) == len(MIXED) and not first.failed
    assert sum(first.sequences) == len(MIXED), "each request ends at one engine"


@pytest.mark.parametrize("policy", [*POLICIES, *sorted(CHOOSERS.keys() - {POOLED})])
def test_no_policy_is_better_than_perfect_placement(policy: str) -> None:
    if policy == "dynamo":
        pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed")
    outcome, best = run(MIXED, replace(SETTING, policy=policy)), run(MIXED, replace(SETTING, policy=POOLED))
    assert len(outcome.ttft) == len(best.ttft) == len(MIXED)
    assert sum(outcome.ttft) >= sum(best.ttft) and outcome.cached_tokens <= best.cached_tokens


@pytest.mark.parametrize("policy", ["expected_time", POOLED])
def test_a_prompt_that_a_group_shares_is_computed_once(policy: str) -> None:
    prompt = [(3, 1600)]
    outcome = run([Call(0.0, prompt, 20) for _ in range(8)], replace(SETTING, policy=policy))
    assert outcome.cached_tokens == 7 * (1600 - 16), "all but the last block, of all but the first"


def test_a_call_follows_the_end_of_the_one_before_and_finds_its_tokens() -> None:
    later = Call(3.0, [(7, 160), (OF_ANSWER, 33), (8, 20)], 5)
    outcome = run([Call(1.0, [(7, 160)], 33, then=[later])], SETTING)
    assert outcome.makespan == pytest.approx(1.0 + 3.0 + sum(outcome.latency))
    assert outcome.cached_tokens == 192, "the answer's last token has not been computed"


def test_as_many_engines_as_the_target_needs() -> None:
    found = engines_for(MIXED, SETTING, 2.5, 90.0)
    late = [sum(ttft > 2.5 for ttft in run(MIXED, replace(SETTING, speeds=[1.0] * n)).ttft) for n in (found - 1, found)]
    assert found > 1 and late[0] > len(MIXED) / 10 >= late[1]


def test_engines_come_and_go_by_serves_delays_and_no_request_is_lost() -> None:
    calls = [Call(0.01 * i, [(1000 + i, 100)], 48) for i in range(60)] + [Call(90.0, [(7, 100)], 10)]
    limits = {"min_replicas": 1, "max_replicas": 4, "upscale_delay_s": 4.0, "downscale_delay_s": 20.0}
    config = AutoscalingConfig(**limits, look_back_period_s=12.0, **policy_of("by_sequences", 8, 2.0))

    def scaled() -> tuple[Outcome, list[tuple[float, int]]]:
        scaler = Autoscaler(config, start_s=5.0)
        return without_wall(run(calls, ONE, scaler.run)), scaler.decisions

    outcome, decisions = scaled()
    (up_s, most), *later = decisions
    assert most == 4 and 1004.0 <= up_s < 1007.0, "its delay after the first statistics, in virtual time"
    assert [number for _, number in later] == [1] and later[0][0] > up_s + 20.0
    assert (len(outcome.ttft), outcome.failed) == (61, 0) and min(outcome.sequences) > 0
    assert outcome.makespan < outcome.engine_s < 3 * outcome.makespan
    assert scaled() == (outcome, decisions)


def test_misses_are_compared_at_equal_engine_seconds() -> None:
    points = [(100.0, 0.4), (200.0, 0.2), (400.0, 0.0)]
    assert [misses_at(engine_s, points) for engine_s in (50.0, 100.0, 150.0, 300.0, 500.0)] == pytest.approx(
        [0.4, 0.4, 0.3, 0.1, 0.0]
    )


def test_real_processes_answer_the_same_requests_with_steps_no_shorter_than_their_costs() -> None:
    calls = [Call(0.1 * i, [(i % 2, 160), (1000 + i, 20)], 8) for i in range(6)]
    setting = replace(ONE, costs=Costs(20.0, 0.1, 1.0), num_fronts=2)
    (outcome, steps), simulated = live(calls, setting), run(calls, setting)
    assert (len(outcome.ttft), outcome.failed, outcome.sequences) == (6, 0, [6])
    assert outcome.prompt_tokens == simulated.prompt_tokens and outcome.output_tokens == simulated.output_tokens
    costs = [setting.costs.step_ms(StepShape(rows, tokens, 0)) for tokens, rows, _ in steps]
    assert all(elapsed_ms > cost - 0.01 for cost, (*_, elapsed_ms) in zip(costs, steps, strict=True)), "it slept"
    assert sum(tokens for tokens, _, _ in steps) == outcome.prompt_tokens - outcome.cached_tokens
    assert fitted([(tokens, rows, 20 + 0.5 * tokens + 2 * rows) for tokens in (0, 99) for rows in (1, 9)]) == (
        pytest.approx((20.0, 0.5, 2.0))
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_repeats_itself_and_shares_prefixes(name: str) -> None:
    first, second, other = (with_later(GENERATORS[name](Random(seed), 0.5, 60.0)) for seed in (1, 1, 2))
    assert [call.tokens() for call in first] == [call.tokens() for call in second]
    assert [call.tokens() for call in first] != [call.tokens() for call in other]
    beginnings = [tuple(call.tokens()[:512]) for call in first]
    assert len(set(beginnings)) < len(beginnings) > 10


def text(length: int, output: int = 7) -> dict[str, object]:
    return {"Prompt Length": length, "Output Length": output, "prompt": "a" * 4 * length}


TRACES = {
    "mooncake.jsonl": '{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}\n'
    '{"timestamp": 6000, "input_length": 512, "output_length": 9, "hash_ids": [3]}\n',
    "aibrix.jsonl": json.dumps({"timestamp": 500, "requests": [text(600), text(512)]})
    + "\n"
    + json.dumps({"timestamp": 3500, "requests": [text(2, 9)]}),
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,600,7\n"
    "2023-11-16 18:15:46.6805900,512,7\n2023-11-16 18:15:49.6805900,5,9\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,600,7,607,API log\n"
    "5,ChatGPT,512,7,519,API log\n6,GPT-4,20,0,20,API log\n8,GPT-4,5,9,14,API log\n",
}


@pytest.mark.parametrize("name", TRACES)
def test_each_format_gives_its_times_lengths_and_shared_prefixes(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(TRACES[name])
    calls = read(path)
    assert [call.at_s for call in calls] == pytest.approx([0.0, 0.0, 3.0])
    assert [call.at_s for call in read(path, spreads=True)] == pytest.approx([0.0, 1.5, 3.0])
    assert [call.output for call in calls] == [7, 7, 9]
    scaled = [len(call.tokens()) for call in read(path, 16)]
    assert scaled == [max(1, len(call.tokens()) // 32) for call in calls]
    first, second, _ = (call.tokens() for call in calls)
    assert (first[:512] == second[:512]) == (name in ("mooncake.jsonl", "aibrix.jsonl"))


def test_the_command_says_which_part_of_the_gap_a_policy_closes(capsys: pytest.CaptureFixture[str]) -> None:
    own = "simulate mixed --rate 7 --seconds 10 --blocks 1500 --block-size 16 --rows 16 --costs 40 1 2 --load 0.6"
    result = result_of(capsys, *own.split(), "--policy", "expected_time", "power_of_two", POOLED)
    closed = result["gap_closed"]["ttft_mean_s"]
    assert (closed["power_of_two"], closed[POOLED]) == (0.0, 1.0) and 0.0 < closed["expected_time"] <= 1.0
