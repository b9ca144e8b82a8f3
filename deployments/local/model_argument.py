"""What `llama-ray up` and `estimate` take: a configuration file, or a model, for which a configuration is made here."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deployments.args import EngineArgs, resolve
from deployments.local.config_file import IMPORT_PATH, ConfigFile, read_config, with_overrides
from llama_core.errors import ConfigError
from llama_core.remote.names import remote_name

if TYPE_CHECKING:
    from llama_core.backends.memory_estimate import MemoryEstimate

CONFIG_SUFFIXES: Final = (".yaml", ".yml", ".json")
USAGE: Final = (
    "Name a model, or a configuration file:\n"
    "  llama-ray up org/name                  of the Hugging Face hub; org/name:Q4_K_M for one of several GGUF files\n"
    "  llama-ray up /models/Llama-3.1-8B      a folder in Hugging Face's or Meta's format\n"
    "  llama-ray up model.gguf                also s3://bucket/folder, gs://bucket/folder, https://host/model.gguf\n"
    "  llama-ray up serve_config.yaml         Serve's configuration file\n"
    "  llama-ray up demo                      the small model that comes with this package"
)
_GPU_SHARE: Final = 0.85  # of a GPU's memory, for weights and the cache of a sequence


def is_config(argument: str) -> bool:
    return argument.endswith(CONFIG_SUFFIXES) or (os.path.isfile(argument) and not argument.endswith(".gguf"))


def fault_of_argument(argument: str) -> str | None:
    """Why it can be neither a model nor a configuration file."""
    if is_config(argument):
        return None if os.path.isfile(argument) else f"file {argument!r} does not exist"
    # Unlike Path.exists, os.path.exists raises nothing for a name that is too long.
    if os.path.exists(resolve(argument)) or remote_name(argument) is not None:
        return None
    return f"{argument!r} does not exist, and is not a model's name of the form org/name"


def shadowed(argument: str) -> str | None:
    """Says so where a folder here has the form of a hub's name."""
    if is_config(argument) or remote_name(argument) is not None or remote_name(f"hf://{argument}") is None:
        return None
    return f"{argument} is a folder here, which is served; hf://{argument} is the hub's model"


def read_argument(argument: str, overrides: Sequence[str]) -> ConfigFile:
    """Raises what `read_config` raises."""
    if is_config(argument):
        return read_config(Path(argument), overrides)
    name = remote_name(argument)
    model_id = name.model_id if name is not None else resolve(argument).resolve().name.removesuffix(".gguf")
    application = {"name": "llama", "route_prefix": "/", "import_path": IMPORT_PATH}
    content: dict[str, Any] = {
        "http_options": {"host": "127.0.0.1"},
        "applications": [application | {"args": {"model_id": model_id, "ckpt_dir": argument}}],
    }
    return with_overrides(ConfigFile(Path("model.yaml"), content, is_made=True), overrides)


def fewest_ranks(args: EngineArgs) -> int:
    """The fewest ranks that hold the model, one on each GPU; 1 on a machine without GPUs. Raises LlamaError."""
    gpus = [] if args.device == "cpu" else gpu_bytes()
    if not gpus:
        return args.num_ranks()
    from llama_core.backends.memory_estimate import at_least_context

    for num_ranks in range(1, len(gpus) + 1):
        estimate, _ = estimate_of(args.model_copy(update={"model_parallel_size": num_ranks}), on_gpu=True)
        least = replace(estimate, config=at_least_context(estimate.config))
        if max(one.weights + one.working for one in least.ranks) + least.least_cache <= _GPU_SHARE * min(gpus):
            return num_ranks
    raise ConfigError(f"the model does not fit on {len(gpus)} GPUs: add device=cpu or quantization=int4")


def estimate_of(args: EngineArgs, *, on_gpu: bool = False) -> tuple["MemoryEstimate", int | None]:
    """The estimate, and the model's own context. Raises CheckpointError, ConfigError or TokenizerError.

    on_gpu: for GPUs, which this machine need not have, whatever `args` say.
    """
    import torch

    from llama_core.backends.memory_estimate import describe_checkpoint, estimate_memory

    _, model, num_shards = describe_checkpoint(args.checkpoint, args.tokenizer)
    num_ranks = args.model_parallel_size or num_shards
    args = args.model_copy(update={"model_parallel_size": num_ranks})
    config = args.engine_config(model.vocab_size, context_length=model.context_length)
    config = replace(config, ckpt_dir=str(args.checkpoint))
    device = torch.device("cuda") if on_gpu or args.device == "cuda" else None
    return estimate_memory(config, num_ranks, device), model.context_length


def gpu_bytes() -> list[int]:
    """The memory of each GPU that this process may use, by nvidia-smi; none where there is no such program."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    command += [] if visible is None else [f"--id={visible}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) * 2**20 for line in done.stdout.split() if line.isdigit()]
