"""The sections, in their order, with the seconds that each may take. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Section:
    """The module benchmarks.gpu.sections.NAME has `run(record, settings)`."""

    name: str
    title: str
    budget_s: int
    min_gpus: int = 1


SECTIONS: Final = (
    Section("checks", "Tests marked cuda", 200),
    Section("memcheck", "Every kernel under compute-sanitizer", 150),
    Section("limits", "What the device reaches", 60),
    Section("decode", "Decodes and prompts beside these limits", 300),
    Section("memory", "Memory taken beside the plan", 120),
    Section("kernels", "Kernels of a decode step", 120),
    Section("products", "Products of few rows, fused and separate", 100),
    Section("attention", "The attention kernel alone", 165),
    Section("mixed", "Host time of steps beside the device's", 120),
    Section("offline", "A batch of requests", 150),
    Section("transformers", "The same batch on transformers", 100),
    Section("vllm", "The same batch on vLLM", 240),
    Section("loading", "Weights from files to the device, both ways of reading", 40),
    Section("recovery", "A killed process and the one after it", 140),
    Section("invariance", "The same text alone and in a batch", 90),
    Section("ranks", "Decodes on several GPUs beside one", 300, min_gpus=2),
    Section("rank_loss", "A rank killed while a group of two replays", 180, min_gpus=2),
    Section("rank_texts", "The same text on one GPU and on two", 180, min_gpus=2),
)
NAMES: Final = tuple(section.name for section in SECTIONS)
TOTAL_S: Final = 1800
# For a device that is there for a quarter of an hour: the most important sections first, in smaller sizes (`settings.SHORT`),
# in seconds. `--only` measures the others.
SHORT: Final = {
    "decode": 75,
    "offline": 30,
    "transformers": 80,
    "checks": 140,
    "invariance": 55,
    "memcheck": 110,
    "attention": 55,
    "loading": 40,
    "memory": 35,
    "recovery": 125,
}
DESCRIBE_S: Final = 20  # of the device and the versions, before the first section


def sections_within(minutes: float) -> Sequence[Section]:
    """What runs in so many minutes, in this order: sections in their short form as far as they fit, the last one cut to what is
    left; from half an hour on all of them in full."""
    if 60 * minutes >= TOTAL_S:
        return SECTIONS
    by_name, left = {section.name: section for section in SECTIONS}, 60 * minutes - DESCRIBE_S
    found = []
    for name, seconds in SHORT.items():
        if left >= seconds / 2:
            found.append(replace(by_name[name], budget_s=int(min(seconds, left))))
            left -= found[-1].budget_s
    return found
