"""What LoRA adapters cost: steps with them, steps without them on a model that has places, and the load of one.

    python -m benchmarks adapters --ckpt DIRECTORY --dtype bfloat16 --adapters 8 --rows 32

Random adapters of all seven projections, rows in turn. Each round runs every contender once, in reverse order every other
round: rows with adapters, rows without any, and the same rows on a model that has no places for adapters.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from benchmarks.harness.common import Spread, emit, interval, percentile, print_table
from benchmarks.harness.in_process import built_llama, run, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import uniform_batch
from llama_core.files.adapter import CONFIG, WEIGHTS, Adapter, open_adapter
from llama_core.model.config import ModelConfig
from llama_core.model.weights import weight_specs

if TYPE_CHECKING:
    from llama_core import Llama


def random_adapter(folder: Path, model: ModelConfig, rank: int) -> Adapter:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    tensors = {}
    for name, spec in weight_specs(model).items():
        if spec.is_linear and name.startswith("layers."):
            module = f"base_model.model.{spec.hugging_face.removesuffix('.weight')}"
            outputs, inputs = spec.shape
            tensors[f"{module}.lora_A.weight"] = (torch.randn(rank, inputs) * inputs**-0.5).bfloat16()
            tensors[f"{module}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
    save_file(tensors, folder / WEIGHTS)
    return open_adapter(folder, model, rank)


def step_ms(llama: "Llama", options: argparse.Namespace, adapters: Sequence[Adapter]) -> float:
    """The median of the steps that decode all rows. Each step admits one adapter that is not loaded."""
    requests = uniform_batch(options.rows, options.prompt, options.output, vocabulary(llama))
    steps = run(llama, requests, adapters=adapters).decode_steps
    return percentile([step.ms for step in steps if step.num_rows == options.rows], 50)


def first_token_ms(llama: "Llama", options: argparse.Namespace, adapters: Sequence[Adapter]) -> float:
    """Of one request alone, whose adapter the ranks load meanwhile: a run begins with none loaded."""
    (request,) = uniform_batch(1, options.first_prompt, 1, vocabulary(llama))
    done = run(llama, [request], adapters=adapters)
    return (done.steps[-1].end_s - done.begin_s) * 1e3


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    length = max(options.prompt + options.output, options.first_prompt + 1)
    limits = {"max_seq_len": length, "max_batch_size": options.rows, "dtype": options.dtype}
    places = {"max_loras": options.adapters, "max_lora_rank": options.rank}
    with built_llama(options, **limits, **places) as llama, built_llama(options, **limits) as plain:
        model = llama.runner.model_config
        adapters = [random_adapter(folder / str(i), model, options.rank) for i in range(options.adapters)]
        contenders = {"adapters": (llama, adapters), "none": (llama, []), "no places": (plain, [])}
        steps: dict[str, list[float]] = {name: [] for name in contenders}
        later = []
        for number in range(options.rounds + 1):  # the first builds kernels and touches pages
            for name in reversed(contenders) if number % 2 else contenders:
                steps[name].append(step_ms(contenders[name][0], options, contenders[name][1]))
            cold = first_token_ms(llama, options, adapters[number % len(adapters) :][:1])
            later.append(cold - first_token_ms(llama, options, []))
    steps = {name: times[1:] for name, times in steps.items()}
    speed = [none / each for each, none in zip(steps["adapters"], steps["none"], strict=True)]
    without = [none / each for each, none in zip(steps["none"], steps["no places"], strict=True)]
    return {
        "step_ms": {name: Spread.of(times) for name, times in steps.items()},
        "speed_with_adapters": interval(speed),
        "speed_of_rows_without": interval(without),
        "first_token_later_ms": Spread.of(later[1:]),
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("adapters", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=4, help="tokens")
    parser.add_argument("--output", type=int, default=48, help="tokens, over the number of adapters")
    parser.add_argument(
        "--first-prompt", type=int, default=128, help="tokens of the request whose first token is timed"
    )
    parser.add_argument("--rounds", type=int, default=20, help="at least 2")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    title = f"{options.adapters} adapters of rank {options.rank} over {options.rows} rows, {model_name(options)}"
    print_table(title, ["figure", "value"], figures.items())
    load = {"adapters": options.adapters, "rank": options.rank, "rows": options.rows, "rounds": options.rounds}
    emit("adapters", {"model": model_name(options), **load, **figures}, options)
