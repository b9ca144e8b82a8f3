"""Random rows of logits with the sampling parameters of their slots, and what may be sampled from them by float64."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llama_core.backends import logit_rules
from llama_core.backends.fused.sampling.sampler import SamplingState, TorchSampler
from llama_core.backends.fused.step_plan import SampleTensors
from llama_core.backends.logit_rules import LogitRules
from llama_core.backends.sampling import GREEDY_BELOW, uniform
from llama_core.backends.sampling_tensors import SlotSamplingArray
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import SlotInit

VOCABULARIES = (1, 2, 33, 300, 4096, 4097, 9000)
MAX_SEQ_LEN = 80
TOLERANCE = 2e-6  # of sums in float32
KINDS = ("normal", "bfloat16", "few values", "flat", "steep", "small", "large")


def random_logits(generator: np.random.Generator, kind: str, vocab: int) -> torch.Tensor:
    row = torch.from_numpy(generator.standard_normal(vocab)).float() * 3
    return {
        "normal": row,
        "bfloat16": row.bfloat16().float(),
        "few values": (row / 2).round() * 2,
        "flat": torch.full((vocab,), float(row[0])),
        "steep": row * 40,
        "small": row * 1e-3,
        "large": row * 1e36,
    }[kind]


def pick(generator: np.random.Generator, values: Seq[Any]) -> Any:
    return values[int(generator.integers(len(values)))]


def plain_params(generator: np.random.Generator, vocab: int) -> dict[str, Any]:
    seeds = generator.integers(-(2**63), 2**63 - 1, 9).tolist()
    return {
        "temperature": pick(generator, (0.0, 1e-6, 0.05, 0.3, 0.7, 1.0, 2.0, 1e4)),
        "top_p": pick(generator, (1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6)),
        "top_k": pick(generator, (0, 0, 1, 2, 7, 40, vocab - 1, vocab, vocab + 5)) if vocab > 1 else 0,
        "min_p": pick(generator, (0.0, 0.0, 1e-4, 0.1, 0.5, 1.0)),
        "seed": pick(generator, (-(2**63), 0, 2**63 - 1, *seeds)),
    }


def ruled_params(generator: np.random.Generator, vocab: int) -> dict[str, Any]:
    def tokens(most: int, least: int = 0, kinds: int = 40) -> list[int]:
        count = int(generator.integers(least, most + 1))
        return [int(token) for token in generator.integers(0, min(vocab, kinds), count)]

    return plain_params(generator, vocab) | {
        "max_tokens": 60,
        "presence_penalty": pick(generator, (0.0, 0.0, 1.1, -2.0)),
        "frequency_penalty": pick(generator, (0.0, 0.0, 0.7, -0.3)),
        "repetition_penalty": pick(generator, (1.0, 1.0, 1.4, 0.7)),
        "logit_bias": tuple((token, float(np.float32(generator.uniform(-9, 9)))) for token in tokens(6)),
        "bad_words": tuple(tuple(tokens(4, 1, kinds=3)) for _ in range(int(generator.integers(6)))),
        "allowed_token_ids": tuple(tokens(30, 1)) if generator.integers(2) else (),
        "min_tokens": pick(generator, (0, 0, 5, 30)),
    }


@dataclass
class Case:
    """Rows of logits [B, vocab]; slot 2 i + 1 has the parameters and the sequence of row i."""

    logits: torch.Tensor
    params: list[SamplingParams]
    inits: list[SlotInit]
    masks: list[np.ndarray | None]

    @property
    def positions(self) -> list[int]:
        return [len(init.tokens) for init in self.inits]

    def rules(self) -> list[LogitRules | None]:
        vocab = self.logits.shape[1]
        return [LogitRules(init, vocab) if init.params.edits_logits else None for init in self.inits]

    def state(self, device: torch.device) -> SamplingState:
        count, vocab = self.logits.shape
        num_slots = 2 * count + 1
        sampling = SlotSamplingArray(num_slots, torch.device("cpu"))
        tokens = torch.zeros((num_slots, MAX_SEQ_LEN), dtype=torch.int64)
        tables = torch.zeros((num_slots, logit_rules.table_words(vocab)), dtype=torch.int64)
        indices = torch.full((count,), -1)
        masks = torch.full((count, logit_rules.bit_words(vocab)), 0x5A5A5A5A5A5A5A5A)
        for i, (init, rules) in enumerate(zip(self.inits, self.rules(), strict=True)):
            slot = 2 * i + 1
            sampling.set(slot, init.params)
            tokens[slot, : len(init.tokens)] = torch.tensor(init.tokens)
            tokens[slot, len(init.tokens) :] = 1  # of another sequence
            for first, words in logit_rules.parts_of(rules) if rules else ():
                tables[slot, first : first + len(words)] = torch.from_numpy(words)
            if (bits := self.masks[i]) is not None:
                indices[i] = place = count - 1 - i
                masks[place] = torch.from_numpy(logit_rules.as_words(bits))
        on_device = SlotSamplingArray(num_slots, device)
        on_device.words.copy_(sampling.words)
        return SamplingState(tokens.to(device), on_device, tables.to(device), indices.to(device), masks.to(device))

    def samples(self, device: torch.device) -> SampleTensors:
        index = torch.arange(len(self.inits), device=device)
        return SampleTensors(index, 2 * index + 1, torch.tensor(self.positions, device=device))

    def edited(self) -> torch.Tensor:
        """The logits under rules and masks, in torch."""
        cpu = torch.device("cpu")
        sampler, has_masks = TorchSampler(self.state(cpu)), any(mask is not None for mask in self.masks)
        return sampler._edited(self.logits, self.samples(cpu), has_masks=has_masks)

    def reversed(self) -> "Case":
        return Case(self.logits.flip(0), self.params[::-1], self.inits[::-1], self.masks[::-1])


def random_case(seed: int, *, has_rules: bool = False, vocabularies: Seq[int] = VOCABULARIES) -> Case:
    generator = np.random.default_rng(seed)
    vocab, count = pick(generator, vocabularies), int(generator.integers(1, 5))
    logits = torch.stack([random_logits(generator, pick(generator, KINDS), vocab) for _ in range(count)])
    inits, masks = [], []
    for i in range(count):
        fields = ruled_params(generator, vocab) if has_rules and i % 3 < 2 else plain_params(generator, vocab)
        # Few different tokens, so that bad words begin in many places.
        kinds, length = min(vocab, pick(generator, (3, 40))), int(generator.integers(1, 61))
        tokens = generator.integers(0, kinds, length).tolist()
        delayed = tuple(set(generator.integers(0, vocab + 2, int(generator.integers(4))).tolist()))
        prompt_length = max(0, length - pick(generator, (0, 1, 2, 20, 60)))
        params = SamplingParams(**fields)
        inits.append(SlotInit(i, tokens, [], params, prompt_length=prompt_length, delayed=delayed))
        mask = generator.integers(0, 2**32, -(-vocab // 32), dtype=np.uint32)
        masks.append(mask if has_rules and generator.integers(2) else None)
    return Case(logits, [init.params for init in inits], inits, masks)


def acceptable(logits: torch.Tensor, params: SamplingParams, position: int) -> set[int]:
    """The tokens that `sampling.sample` may give for one row, if probabilities, sums and limits are wrong by at most TOLERANCE.
    Equal logits are in the order of their ids, unless others are almost equal: all of these may be in any order."""
    temperature = np.float32(params.temperature)
    with np.errstate(over="ignore"):
        scaled = logits.numpy() / max(temperature, np.float32(GREEDY_BELOW))
    if temperature < np.float32(GREEDY_BELOW) or not math.isfinite(scaled.max()):
        return {int(logits.argmax())}
    probs = np.exp(scaled.astype(np.float64) - scaled.max())
    order = np.lexsort((np.arange(len(probs)), -probs))
    number = uniform(torch.tensor([params.seed]), torch.tensor([position])).item()
    found = set()
    for nudges in np.stack(np.meshgrid(*[(-TOLERANCE, TOLERANCE)] * 3), -1).reshape(-1, 3):
        of_min_p, of_top_p, of_number = nudges
        kept = order[probs[order] >= np.float32(params.min_p) * (1 + of_min_p)] if params.min_p < 1 else order
        if params.min_p == 1:
            kept = order[probs[order] == 1]
        kept = kept[: params.top_k] if params.top_k else kept
        sums = probs[kept].cumsum()
        before = sums - probs[kept]
        top_p = float(np.float32(params.top_p)) * (1 + of_top_p)
        size = len(kept) if params.top_p == 1 else max(1, int((before <= top_p * sums[-1]).sum()))
        place = int(np.searchsorted(sums, number * (1 + of_number) * sums[size - 1], side="right"))
        found.add(int(kept[min(place, size - 1)]))
    near = {token: np.abs(probs - probs[token]) <= TOLERANCE * probs[token] for token in found}
    return found.union(
        *(is_near.nonzero()[0].tolist() for token, is_near in near.items() if (scaled[is_near] != scaled[token]).any())
    )
