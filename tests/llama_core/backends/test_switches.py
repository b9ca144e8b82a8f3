"""Every switch of ModelConfig on the native backend: near a plain forward in float64 on any number of ranks, and the same bits
however its tokens are computed."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_core.backends.native.backend import NativeBackend, check_available
from llama_core.backends.native.build import Unavailable
from llama_core.backends.parallel import Parallel, alone
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.files.code import code_version
from llama_core.model.config import ModelConfig
from llama_core.model.rope import RopeConfig
from llama_core.model.weight_formats import QUANTIZED
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Row, SlotInit, StepInput
from tests.support import plain_model
from tests.support.forking import run_with_torch
from tests.support.full_runs import with_full_ones
from tests.support.hugging_face import CONFIGS, read
from tests.support.native_builds import FLAGS, IN_EACH_RUN, unsupported_reason, variables
from tests.support.plain_model import decoder, poke_embedding
from tests.support.plans import plan_of

# Divided by 1 rank only: 6 query heads on 3 key/value heads, and dimensions that neither 2 nor 4 ranks divide.
SIZES: dict[str, Any] = {
    **{"dim": 72, "n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "head_dim": 16, "hidden_dim": 200, "vocab_size": 131}
}
BASE = decoder(**SIZES)
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "q, k, v biases": {"attention_bias": True},
    "all biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "q, k norm": {"qk_norm": True},
    "narrow heads": {"head_dim": 12},
    "narrow heads, q, k norm": {"head_dim": 20, "qk_norm": True},
    "wide heads": {"head_dim": 32},
    "a key/value head for each query head": {"n_kv_heads": 6},
    "tied": {"tied_embeddings": True},
    "windows": {"windows": (5, 0, 37)},
    "one window": {"windows": (33, 33, 33)},
    "chunks": {"windows": (-5, 0, -37)},
    "chunks of one size": {"windows": (-33, -33, -33)},
    "linear": {"rope": RopeConfig("linear", factor=4.0)},
    "dynamic": {"rope": RopeConfig("dynamic", factor=2.0, original_context=64)},
    "llama3": {"rope": RopeConfig("llama3", 5e5, 8.0, original_context=32)},
    "yarn": {"rope": RopeConfig("yarn", factor=4.0, original_context=32, attention_factor=1.14)},
    "Qwen2": {"attention_bias": True, "tied_embeddings": True, "windows": (0, 20, 20)},
    "Qwen3": {"qk_norm": True, "head_dim": 32, "tied_embeddings": True},
    "all": {
        **{"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "qk_norm": True, "head_dim": 24},
        **{"windows": (1, 17, 64), "rope": RopeConfig("yarn", factor=4.0, original_context=32, attention_factor=1.14)},
    },
}
# Families of CONFIGS, with the switches that no other has.
FAMILIES = (
    *(
        "gemma3-images",
        "glm4",
        "ministral3",
        "muse-glimmer",
        "olmo3",
        "qwen2-moe",
        "qwen3-moe",
        "qwen3-moe-all",
        "gpt-oss",
        "llama4",
    ),
)
TOKENS = [1 + i * 37 % 129 for i in range(100)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.06}
GREEDY = SamplingParams(temperature=0.0, logprobs=0)

each_switch = pytest.mark.parametrize("switch", [*SWITCHES, *FAMILIES])


def model_with(switch: str) -> ModelConfig:
    if switch in SWITCHES:
        return decoder(**SIZES | SWITCHES[switch]).check(switch)
    sizes: dict[str, Any] = {
        "hidden_size": 72,
        "intermediate_size": 200,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
    sizes |= {"qk_scale_factor": 1.0}  # sharper attention loses more in bfloat16
    return read(CONFIGS[switch].get("text_config", CONFIGS[switch]) | sizes | {"head_dim": 16, "vocab_size": 131}, 131)


class Prompts:
    """Computes TOKENS in slot 3 of a runner in different ways. Every method returns the logits after them, float32 [vocab]."""

    def __init__(self, parallel: Parallel, model: ModelConfig, **settings: Any) -> None:
        self.runner = plain_model.load_runner(parallel, model, **settings, max_step_tokens=700)
        assert isinstance(self.runner.backend, NativeBackend)
        self._blocks_each = self.runner.config.blocks_per_sequence

    def in_chunks(self, chunks: list[int], strangers: int = 0, start: int = 0, admit: bool = True) -> torch.Tensor:
        """`start`: the tokens before it are computed. strangers: sequences that are computed beside it."""
        inits = [SlotInit(3, TOKENS, self._blocks(3), GREEDY)] if admit else []
        others = [slot for slot in range(8) if slot != 3][:strangers]
        for slot in others:
            tokens = [1] + [(slot * 31 + i) % 130 for i in range(99)]
            inits.append(SlotInit(slot, tokens, self._blocks(slot), SamplingParams(0.9, seed=slot)))
        for count in chunks:
            rows = [Row(slot, start, count, start + count == len(TOKENS)) for slot in [*others, 3]]
            self.runner.step(StepInput(0, 0, rows, admit=inits))
            inits, start = [], start + count
        return self._logits(len(others) if start == len(TOKENS) else 0)

    def behind_a_prefix_hit(self) -> torch.Tensor:
        """The first 48 tokens are those of another sequence."""
        self.runner.step(StepInput(0, 0, [Row(5, 0, 48, False)], admit=[SlotInit(5, TOKENS, self._blocks(5), GREEDY)]))
        blocks = [*self._blocks(5)[:3], *self._blocks(3)[3:]]
        self.runner.step(StepInput(0, 0, [Row(3, 48, 52, True)], admit=[SlotInit(3, TOKENS, blocks, GREEDY)]))
        return self._logits(0)

    def as_drafts(self) -> torch.Tensor:
        """The last tokens are verified as right drafts, followed by wrong ones."""
        self.in_chunks([95])
        draft = Draft(3, 96, [*TOKENS[96:], 5, 6])
        self.runner.step(StepInput(0, 0, [Row(3, 95, 7, True, 6)], drafts=[draft]))
        return self._logits(4)

    def after_a_preemption(self) -> torch.Tensor:
        """The first 70 tokens are computed, then all anew in blocks that other sequences had."""
        self.in_chunks([70], strangers=3)
        self.runner.step(StepInput(0, 0, [Row(3, 0, 100, True)], admit=[SlotInit(3, TOKENS, self._blocks(1), GREEDY)]))
        return self._logits(0)

    def with_freed_blocks(self, chunk: int) -> torch.Tensor:
        """Blocks behind every layer's window belong to another sequence, whose keys and values are NaN, or are -1."""
        backend, window = self.runner.backend, self.runner.model_config.longest_window
        assert isinstance(backend, NativeBackend)
        poke_embedding(backend, 130, float("nan"))
        foreign = SlotInit(6, [130] * 16, self._blocks(6), GREEDY)
        self.runner.step(StepInput(0, 0, [Row(6, 0, 16, False)], admit=[foreign]))
        tables = self.runner._slots.block_tables
        admit = [SlotInit(3, TOKENS, self._blocks(3), GREEDY)]
        for start in range(0, len(TOKENS), chunk):
            freed = max(0, start - window + 1) // 16 if window else 0
            tables[3, :freed] = torch.tensor([self._blocks(6)[0] if i % 2 == freed % 2 else -1 for i in range(freed)])
            self.runner.step(StepInput(0, 0, [Row(3, start, chunk, start + chunk == len(TOKENS))], admit=admit))
            admit = []
        return self._logits(0)

    def _blocks(self, slot: int) -> list[int]:
        """In reverse order, so that a cache which ignores its block table gives other logits."""
        return list(range(slot * self._blocks_each, (slot + 1) * self._blocks_each))[::-1]

    def _logits(self, sample: int) -> torch.Tensor:
        return self.runner.backend.logits_of_samples([sample])[0].clone()


@each_switch
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_logits_are_near_a_plain_forward_on_any_number_of_ranks(ranks: Any, world_size: int, switch: str) -> None:
    model = model_with(switch)
    exact = plain_model.forward(model, plain_model.random_weights(model), TOKENS, 160)[-1]
    for dtype, tolerance in TOLERANCE.items():
        if world_size == 1:
            got = [_last_logits(alone("cpu"), model, dtype)]
        else:
            got = ranks(world_size).call(_last_logits, model, dtype)
        for whole, in_chunks in got:
            error = (whole - exact).abs().max() / (exact.max() - exact.min())
            assert error < tolerance, dtype
            assert torch.equal(in_chunks, whole) and torch.equal(whole, got[0][0])


def _last_logits(
    parallel: Parallel, model: ModelConfig, dtype: str, quantization: str = "none"
) -> tuple[torch.Tensor, torch.Tensor]:
    prompts = Prompts(parallel, model, dtype=dtype, quantization=quantization)
    return prompts.in_chunks([100]), prompts.in_chunks([70, 29, 1])


def differing_ways(model: ModelConfig, **settings: Any) -> list[str]:
    """The ways to compute TOKENS whose logits differ in any bit from those of one chunk alone."""
    prompts = Prompts(alone("cpu"), model, **settings)
    expected = prompts.in_chunks([100])
    assert expected.isfinite().all()
    ways = {
        "one by one": prompts.in_chunks([1] * 100),
        "in chunks": prompts.in_chunks([16, 32, 51, 1]),
        "among others": prompts.in_chunks([100], strangers=6),
        "one by one among others": prompts.in_chunks([1] * 100, strangers=3),
        "in chunks among others": prompts.in_chunks([40, 3, 57], strangers=4),
        "behind a prefix hit": prompts.behind_a_prefix_hit(),
        "as drafts": prompts.as_drafts(),
        "after a preemption": prompts.after_a_preemption(),
        "with freed blocks": prompts.with_freed_blocks(10),
        "one by one with freed blocks": prompts.with_freed_blocks(1),
    }
    return [name for name, logits in ways.items() if not torch.equal(logits, expected)]


@each_switch
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_how_the_tokens_are_computed(dtype: str, switch: str) -> None:
    assert differing_ways(model_with(switch), dtype=dtype) == []


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_whose_values_are_nan_spoils_no_block_before_its_own(dtype: str) -> None:
    prompts = Prompts(alone("cpu"), decoder(**SIZES | {"n_heads": 24, "head_dim": 32}), dtype=dtype)
    expected = prompts.in_chunks([100])
    assert isinstance(prompts.runner.backend, NativeBackend)
    poke_embedding(prompts.runner.backend, 130, float("nan"))
    spoiled, theirs, own = [*TOKENS[:82], 130, TOKENS[83]], prompts._blocks(5), prompts._blocks(3)
    prompts.runner.step(StepInput(0, 0, [Row(5, 0, 84, False)], admit=[SlotInit(5, spoiled, theirs, GREEDY)]))
    admit = [SlotInit(3, TOKENS, [*theirs[:5], *own[5:]], GREEDY)]
    prompts.runner.step(StepInput(0, 0, [Row(3, 80, 20, True)], admit=admit))
    assert torch.equal(prompts._logits(0), expected)


FORMATS = [(dtype, name) for dtype in TOLERANCE for name in ("none", *QUANTIZED) if name != "fp8"]
# Heads of whole register tiles, and inputs for K slices in every format on tile registers.
WIDE = decoder(dim=768, n_layers=1, n_heads=12, n_kv_heads=4, head_dim=64, hidden_dim=1024, vocab_size=640)


PROGRAM = """
import json, torch
torch.set_num_threads(2)
from tests.llama_core.backends.test_switches import *
for switch in ("narrow heads, q, k norm", "windows", "one window", "all"):
    for dtype in TOLERANCE:
        print(json.dumps([switch, dtype, differing_ways(model_with(switch), dtype=dtype)]))
for model in (WIDE, model_with("gpt-oss"), model_with("llama4"), model_with("qwen2-moe")):
    for dtype, quantization in FORMATS:
        print(json.dumps([quantization, dtype, differing_ways(model, dtype=dtype, quantization=quantization)]))
"""


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "int4"), ("bfloat16", "int4_min")])
def test_bits_on_two_ranks_do_not_depend_on_chunks_where_ranks_cut_groups(
    ranks: Any, dtype: str, quantization: str
) -> None:
    """The output projection has 48 inputs on each: no whole groups of 32."""
    model = replace(BASE, head_dim=16, hidden_dim=192)
    for whole, in_chunks in ranks(2).call(_last_logits, model, dtype, quantization):
        assert torch.equal(in_chunks, whole)


@pytest.mark.parametrize("flags", with_full_ones(FLAGS, IN_EACH_RUN), ids=lambda flags: flags or "this CPU")
def test_bits_do_not_depend_on_how_the_tokens_are_computed_whatever_the_instructions(flags: str) -> None:
    if reason := unsupported_reason(flags):
        pytest.skip(reason)
    done = run_with_torch(PROGRAM, timeout_s=300, changes=variables(flags))
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 8 + 4 * len(FORMATS) and all(differing == [] for _, _, differing in results), results


def test_a_float16_checkpoint_is_bfloat16_natively_and_float16_in_torch() -> None:
    model, stored = model_with("none"), torch.float16
    runner = plain_model.load_runner(alone("cpu"), model, stored=stored, dtype="auto")
    assert runner.report.dtype == "bfloat16 (the checkpoint is float16)" and isinstance(runner.backend, NativeBackend)
    runner = plain_model.load_runner(alone("cpu"), model, stored=stored, dtype="auto", quantization="int8")
    assert runner.report.dtype == "bfloat16 (the checkpoint is float16) with int8 weights"
    runner = plain_model.load_runner(alone("cpu"), model, stored=stored, dtype="float32")
    assert runner.report.dtype == "float32" and isinstance(runner.backend, NativeBackend)
    for settings in ({"dtype": "float16"}, {"dtype": "auto", "backend": "torch"}, {"dtype": "auto", "block_size": 24}):
        runner = plain_model.load_runner(alone("cpu"), model, stored=stored, **settings)
        assert (runner.backend.name, runner.report.dtype) == ("torch", "float16")
    for name, value in (("dtype", "float16"), ("block_size", 24)):
        with pytest.raises(ConfigError, match=str(value)):
            plain_model.load_runner(
                alone("cpu"), model, stored=stored, backend="native", **dict[str, Any]({name: value})
            )


def test_torch_names_the_machine_on_which_its_bits_depend_and_the_native_backend_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def numerics(backend: str, threads: int, has_avx2: bool) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": has_avx2, "num_sockets": threads})
        runner = plain_model.load_runner(alone("cpu"), model_with("none"), backend=backend)
        return runner.report.numerics

    machines = [(2, True), (2, False), (3, True)]
    assert len({numerics("torch", *machine) for machine in machines}) == 3
    assert {numerics("native", *machine) for machine in machines} == {code_version()}


@pytest.mark.parametrize(
    ("fields", "reason"), [({"head_dim": 514}, "head_dim is over 512"), ({"hidden_dim": 1}, "smaller than its 2 ranks")]
)
def test_what_the_native_backend_cannot_compute_is_refused_with_the_reason(fields: dict[str, int], reason: str) -> None:
    config = EngineConfig("memory", BASE.vocab_size, 160, 8)
    model = replace(BASE, **fields)  # type: ignore[arg-type]
    plan = plan_of(model, lambda name: "dense", "none", world_size=2)
    with pytest.raises(Unavailable, match=reason):
        check_available(config, model, torch.float32, plan, Parallel(0, 2, torch.device("cpu")))
