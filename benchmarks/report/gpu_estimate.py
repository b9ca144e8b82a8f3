"""Tables of the page that come from the model of a step's time (`llama_core.step_time`), not from results."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.report.markdown import table
from llama_core.model_config import ModelConfig
from llama_core.step_time.devices import find_gpu
from llama_core.step_time.forecast import cache_bytes, forecasts
from llama_core.step_time.step_time import step_time
from llama_core.step_time.work import RankWork, StepLoad

LLAMA_2_7B: Final = ModelConfig(4096, 32, 32, 32, 128, 11008, 32000)
LLAMA_2_70B: Final = ModelConfig(8192, 80, 64, 8, 128, 28672, 32000)
LLAMA_3_8B: Final = ModelConfig(4096, 32, 32, 8, 128, 14336, 128256)
BFLOAT16, INT8, INT4_IN_GROUPS_OF_32 = 2.0, 1.0, 4.5 / 8
HEADROOM: Final = 0.1  # of the memory, which ranks leave free
SHOWN: Final = (
    ("Llama 2 7B", LLAMA_2_7B, 1, ("l4", "a100-80", "l40s", "h100-sxm", "h200", "b200")),
    ("Llama 3 8B", LLAMA_3_8B, 1, ("a100-80", "h100-sxm", "b200")),
    ("Llama 2 70B", LLAMA_2_70B, 8, ("a100-80", "h100-sxm", "b200")),
)


class Published(NamedTuple):
    """Tokens a second at batch 1, by the number of ranks, on A100s of 80 GB: gpt-fast's README (0f925b5) and its blog."""

    name: str
    model: ModelConfig
    weights: str
    bytes_per_weight: float
    tokens_per_s: Mapping[int, float]

    def share_of_model(self, ranks: int) -> float:
        """The published speed, of the speed that the model estimates."""
        load = StepLoad(1, 105)  # in the middle of its 200 tokens, behind a prompt of 5
        work = RankWork.of(self.model, ranks, lambda name: self.bytes_per_weight, 2)
        return self.tokens_per_s[ranks] * step_time(work, load, find_gpu("a100-80"), "bfloat16").seconds


GPT_FAST: Final = (
    Published("Llama 2 7B", LLAMA_2_7B, "bfloat16", BFLOAT16, {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}),
    Published("Llama 3.1 8B", LLAMA_3_8B, "bfloat16", BFLOAT16, {1: 94, 2: 149, 4: 217, 8: 276}),
    Published("Llama 2 70B", LLAMA_2_70B, "bfloat16", BFLOAT16, {2: 21.32, 4: 38.01, 8: 62.50}),
    Published("Llama 2 7B", LLAMA_2_7B, "int8", INT8, {1: 155.58}),
    Published("Llama 2 70B", LLAMA_2_70B, "int8", INT8, {1: 19.13, 8: 80.44}),
    Published("Llama 2 7B", LLAMA_2_7B, "int4 in groups of 32", INT4_IN_GROUPS_OF_32, {1: 196.80}),
    Published("Llama 2 70B", LLAMA_2_70B, "int4 in groups of 32", INT4_IN_GROUPS_OF_32, {1: 25.25, 8: 90.77}),
)


def gpu_estimate(results: Sequence[dict[str, Any]]) -> str:
    """Steps of bfloat16 models with 1,024 cached tokens a decode; None where the cache does not hold them. Reads no result."""
    rows: list[tuple[object, ...]] = []
    steps: list[str] = []
    for name, model, ranks, gpus in SHOWN:
        for gpu in map(find_gpu, gpus):
            work = RankWork.of(model, ranks, lambda name: BFLOAT16, 2)
            free = cache_bytes(gpu, HEADROOM, int(work.weight_bytes))
            found = forecasts(
                model, ranks, gpu, "bfloat16", lambda name: BFLOAT16, 1024, free // (work.cache_bytes * model.n_layers)
            )
            steps = [f"{one.name}, ms" for one in found]
            device = f"{ranks} x {gpu.title}" if ranks > 1 else gpu.title
            times = (one.time.seconds * 1e3 if one.fits else None for one in found)
            rows.append((f"{name}, {device}", *times, found[0].tokens_per_s))
    return table(["estimated", *steps, "tokens/s of 1 decode"], rows)


def gpu_published(results: Sequence[dict[str, Any]]) -> str:
    """Published engines beside the model. Reads no result."""
    return table(
        ["gpt-fast, A100 80 GB, batch 1", "published tokens/s by ranks", "of the model"],
        [
            (
                f"{one.name}, {one.weights}",
                ", ".join(f"{ranks}: {rate:g}" for ranks, rate in one.tokens_per_s.items()),
                ", ".join(f"{one.share_of_model(ranks):.2f}" for ranks in one.tokens_per_s),
            )
            for one in GPT_FAST
        ],
    )
