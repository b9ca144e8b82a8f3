"""The model of a step's time, beside published measurements and the formulas' own limits."""

import pytest

from benchmarks.report.gpu_estimate import (
    BFLOAT16,
    GPT_FAST,
    INT4_IN_GROUPS_OF_32,
    INT8,
    LLAMA_2_7B,
    LLAMA_2_70B,
    LLAMA_3_8B,
    Published,
)
from llama_core.errors import ConfigError
from llama_core.model_config import ModelConfig
from llama_core.step_time.devices import BANDWIDTH_SHARE, GPUS, LAUNCH_S, find_gpu
from llama_core.step_time.forecast import cache_bytes, forecasts
from llama_core.step_time.step_time import StepTime, all_reduce_s, step_time
from llama_core.step_time.work import RankWork, StepLoad

MISTRAL_7B = ModelConfig(4096, 32, 32, 8, 128, 14336, 32000, windows=(4096,) * 32)
# The least and the greatest share of the model that gpt-fast reaches. The model does not count the instructions that expand
# quantized weights.
LIMITS = {BFLOAT16: (0.65, 0.87), INT8: (0.55, 0.8), INT4_IN_GROUPS_OF_32: (0.45, 0.65)}


def timed(
    model: ModelConfig, load: StepLoad, gpu: str = "h100-sxm", ranks: int = 1, weight: float = BFLOAT16
) -> StepTime:
    return step_time(RankWork.of(model, ranks, lambda name: weight, 2), load, find_gpu(gpu), "bfloat16")


@pytest.mark.parametrize("published", GPT_FAST, ids=lambda one: f"{one.name}, {one.weights}")
def test_published_engines_reach_a_stated_share_of_the_model(published: Published) -> None:
    """No engine is faster than the model, and the share hardly depends on the ranks, so that collectives are right too."""
    shares = [published.share_of_model(ranks) for ranks in published.tokens_per_s]
    least, greatest = LIMITS[published.bytes_per_weight]
    assert least <= min(shares) and max(shares) <= greatest, shares
    assert max(shares) / min(shares) < 1.2, shares


def test_the_bytes_of_a_step_at_the_datasheets_bandwidth() -> None:
    """Computed by hand: 13.2 GB of weights and 0.5 MB a cached position, at 3.35 TB/s."""
    assert timed(LLAMA_2_7B, StepLoad(1, 256)).read_s * 1e3 == pytest.approx(3.98, abs=0.01)
    assert timed(LLAMA_2_7B, StepLoad(64, 512)).read_s * 1e3 == pytest.approx(9.07, abs=0.01)
    assert timed(LLAMA_2_70B, StepLoad(1, 256), ranks=8).read_s * 1e3 == pytest.approx(5.13, abs=0.02)


def test_a_prompt_is_limited_by_its_operations_and_a_decode_by_its_bytes() -> None:
    prompt, decode = timed(LLAMA_2_7B, StepLoad(0, 0, 2048)), timed(LLAMA_2_7B, StepLoad(1, 1024))
    operations = 2 * 2048 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert prompt.products_s == pytest.approx(operations / find_gpu("h100-sxm").product_rate("bfloat16"), rel=0.01)
    assert decode.products_s == pytest.approx((13.2e9) / (3.35e12 * BANDWIDTH_SHARE), rel=0.01)
    assert decode.collectives_s == prompt.collectives_s == 0


@pytest.mark.parametrize("gpu", GPUS)
def test_more_work_never_takes_less_time(gpu: str) -> None:
    rows = [timed(LLAMA_3_8B, StepLoad(count, 512), gpu).seconds for count in (1, 2, 8, 64, 256, 1024)]
    contexts = [timed(LLAMA_3_8B, StepLoad(8, length), gpu).seconds for length in (1, 128, 4096, 100_000)]
    chunks = [timed(LLAMA_3_8B, StepLoad(8, 512, length), gpu).seconds for length in (0, 1, 128, 2048, 8192)]
    starts = [timed(LLAMA_3_8B, StepLoad(0, 0, 512, start), gpu).seconds for start in (0, 512, 8192)]
    for series in (rows, contexts, chunks, starts):
        assert series == sorted(series) and series[-1] > series[0]


def test_windows_bound_attention_and_ranks_divide_work() -> None:
    near, far = (timed(MISTRAL_7B, StepLoad(8, length)) for length in (4096, 60_000))
    assert far.attention_s == pytest.approx(near.attention_s, rel=0.01)  # its window begins within a split
    alone, four = (timed(LLAMA_2_70B, StepLoad(64, 512), "b200", ranks) for ranks in (1, 4))
    assert four.products_s == pytest.approx(alone.products_s / 4, rel=0.01)
    assert four.launches_s == alone.launches_s and four.collectives_s > 0
    # 8 key/value heads on 6 ranks: the ranks with two of them have 16 of 64 heads.
    six = RankWork.of(LLAMA_2_70B, 6, lambda name: BFLOAT16, 2)
    assert six.n_heads == 16 and 6 * six.weight_bytes > RankWork.of(LLAMA_2_70B, 1, lambda name: 2.0, 2).weight_bytes


def test_few_programs_of_attention_read_no_faster_than_their_multiprocessors() -> None:
    """Llama 3 8B at batch 1: 8 key heads, so 1,024 cached tokens are read by 64 programs, and by 528 at batch 64."""
    gpu = find_gpu("h100-sxm")
    a_head, all_heads = 2 * 128 * 2, 2 * 8 * 128 * 2
    alone = timed(LLAMA_3_8B, StepLoad(1, 1024)).attention_s
    assert alone == pytest.approx(32 * 128 * a_head * gpu.multiprocessors / gpu.read_rate)
    splits = 64 * 8 * 32 * (128 + 1) * 2 * 4  # rows, splits, query heads
    many = timed(LLAMA_3_8B, StepLoad(64, 1024)).attention_s
    assert many == pytest.approx(32 * (64 * 1024 * all_heads + splits) / gpu.read_rate)
    # A key head a program, whatever max_seq_len is: a split of 4,096 positions took eight times as long.
    assert 8 * alone == pytest.approx(32 * 1024 * a_head * gpu.multiprocessors / gpu.read_rate)


def test_swiglu_in_its_products_epilogue_saves_a_launch_a_layer_and_its_traffic() -> None:
    """One more row than 64 goes to the library."""
    for weight, ranks in ((BFLOAT16, 1), (BFLOAT16, 8), (INT8, 1)):
        few, many = (timed(LLAMA_3_8B, StepLoad(count, 512), ranks=ranks, weight=weight) for count in (64, 65))
        assert many.launches_s - few.launches_s == pytest.approx(32 * LAUNCH_S)
        saved = 32 * 2 * 64 * 2 * (14336 // ranks) * 2  # layers; written and read; rows; gate and up; bytes
        assert many.activations_s * 64 / 65 - few.activations_s == pytest.approx(saved / find_gpu("h100-sxm").read_rate)


def test_an_all_reduce_has_a_latency_by_ranks_and_a_bandwidth() -> None:
    link = find_gpu("h100-sxm").link
    assert all_reduce_s(10**6, 1, link) == 0
    assert all_reduce_s(0, 8, link) == pytest.approx(6.6e-6 + 14 * 0.6e-6)
    large = 2**30
    assert all_reduce_s(large, 8, link) == pytest.approx(1.75 * large / (0.75 * 450e9), rel=0.01)
    assert all_reduce_s(large, 2, find_gpu("l4").link) > 10 * all_reduce_s(large, 2, link)


def test_a_forecast_says_what_the_cache_does_not_hold() -> None:
    gpu = find_gpu("a10")
    free = cache_bytes(gpu, 0.1, int(RankWork.of(LLAMA_2_7B, 1, lambda name: 2.0, 2).weight_bytes))
    tokens = free // (2 * 32 * 4096 * 2)
    found = {
        one.load.decodes: one
        for one in forecasts(LLAMA_2_7B, 1, gpu, "bfloat16", lambda name: 2.0, 1024, tokens)
        if not one.load.chunk
    }
    assert found[8].fits and not found[64].fits
    assert found[8].tokens_per_s == pytest.approx(8 / found[8].time.seconds)
    assert 0.5 < found[1].share_of_bandwidth < BANDWIDTH_SHARE


def test_gpus_have_short_names_and_an_unknown_one_is_refused_with_a_list() -> None:
    assert find_gpu("H100") is GPUS["h100-sxm"] and find_gpu("RTX4090") is find_gpu("4090")
    with pytest.raises(ConfigError, match="h100-sxm") as refused:
        find_gpu("tpu")
    assert refused.value.param == "gpu" and "tpu" not in refused.value.message
    for gpu in GPUS.values():
        assert gpu.source and 0.5 < gpu.product_share < 1 and gpu.product_rate("fp8") >= gpu.product_rate("bfloat16")
