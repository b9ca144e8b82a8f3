"""LoRA adapters in PEFT's files for the small models of `families.py`, and what transformers generates with them.

transformers gets the adapter merged into its weights in float32, as PEFT's `merge_and_unload` does.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from llama_core.backends.parallel import Parallel
from llama_core.backends.runner import ModelRunner
from llama_core.batch_loop import run_batch
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.config import EngineConfig
from llama_core.files.adapter import Adapter, open_adapter
from llama_core.model.weights import weight_specs
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support import families
from tests.support.hugging_face import VOCAB_SIZE

# Of families that store several matrices as one: what stands for a target.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# By name: fields of adapter_config.json. Ranks and factors differ, also from layer to layer.
SHAPES: Mapping[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]},
    "attention": {"r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "stabilized": {"r": 16, "lora_alpha": 8, "target_modules": [*MLP, "o_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [*ATTENTION, *MLP],
        "rank_pattern": {"k_proj": 7, r"layers\.0\.mlp\.up_proj": 1},
        "alpha_pattern": {"down_proj": 2, "q_proj": 12, "v_proj": -3, "gate_proj": 0},
    },
}
MAX_RANK = 16
Generated = list[tuple[list[int], list[float]]]
PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None}


class Merged(NamedTuple):
    """Of one linear layer: the weight's name in transformers, A, B and their product's factor."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def write(folder: Path, base: Path, fields: Mapping[str, Any], seed: int = 0, scale: float = 1.0) -> list[Merged]:
    """Write an adapter with random matrices for the model in `base`. Returns what it adds to the model's weights. scale: of A,
    whose inverse B has; a power of two leaves the bits of answers as they are."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | dict(fields)))
    generator, merged = torch.Generator().manual_seed(seed), []
    tensors: dict[str, torch.Tensor] = {}
    specs = weight_specs(open_checkpoint(base).model_config(VOCAB_SIZE))
    shapes = {spec.hugging_face: spec.stored_shape for spec in specs.values() if spec.is_linear}

    def of(pattern: str, module: str, default: float) -> float:
        given = fields.get(pattern, {})
        return next((value for key, value in given.items() if re.match(rf"(.*\.)?({key})$", module)), default)

    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        last = module.split(".")[-1]
        if not {last, *_FUSED.get(last, ())} & set(fields["target_modules"]):
            continue
        layers = fields.get("layers_to_transform")
        if layers is not None and int(name.split(".")[2]) not in layers:
            continue
        rank = int(of("rank_pattern", module, fields["r"]))
        alpha = of("alpha_pattern", module, fields["lora_alpha"])
        factor = alpha / (rank**0.5 if fields.get("use_rslora") else rank)
        a = torch.randn((rank, shape[1]), generator=generator) * shape[1] ** -0.5 * scale
        b = torch.randn((shape[0], rank), generator=generator) * 0.3 / scale
        merged.append(Merged(name, a, b, factor))
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


def expected(base: Path, merged: list[Merged]) -> families.Expected:
    """What transformers generates with the adapter merged."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    for name, a, b, scale in merged:
        parameters[name].data += scale * (b @ a)
    return families.continued(model)


def new_runner(parallel: Parallel, directory: str, backend: str, **overrides: Any) -> ModelRunner:
    """With three places of rank MAX_RANK, so that a fourth adapter has to wait or to replace another."""
    fields: dict[str, Any] = {
        "max_loras": 3,
        "max_lora_rank": MAX_RANK,
        "dtype": "float32",
        "backend": backend,
    } | overrides
    config = EngineConfig(directory, VOCAB_SIZE, families.MAX_SEQ_LEN, 8, 64, device="cpu", **fields)
    runner = ModelRunner.load(config, parallel)
    runner.allocate_cache(runner.max_num_blocks())
    runner.warm_up()
    return runner


def generate(runner: ModelRunner, requests: list[tuple[list[int], Adapter | None]]) -> list[Sequence]:
    """Greedy, all requests together. Sequences have log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=families.NUM_TOKENS, logprobs=0)
    sequences = [
        Sequence(
            prompt, params, len(prompt) + families.NUM_TOKENS, terms=Terms(adapter=adapter.digest if adapter else "")
        )
        for prompt, adapter in requests
    ]
    adapters = [adapter for _, adapter in requests if adapter is not None]
    run_batch(runner, runner.max_num_blocks(), frozenset(), sequences, adapters)
    return sequences


def run(
    parallel: Parallel, directory: str, backend: str, folders: list[str | None], together: bool, **overrides: Any
) -> Generated:
    """What this rank generates for each of `families.PROMPTS` with each adapter (None: the base), in a batch of all requests
    or one by one: tokens and log-probabilities."""
    runner = new_runner(parallel, directory, backend, **overrides)
    opened = [None if folder is None else open_adapter(folder, runner.model_config, MAX_RANK) for folder in folders]
    requests = [(prompt, adapter) for adapter in opened for prompt in families.PROMPTS]
    batches = [requests] if together else [[request] for request in requests]
    done = [seq for batch in batches for seq in generate(runner, batch)]
    assert not any(seq.error for seq in done), [seq.error for seq in done]
    return [(seq.output, [each.logprob for each in seq.logprobs]) for seq in done]
