"""Embeddings by a rank's runner and a scheduler, and those of transformers. Runs on every rank of a group."""

import json
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import processors

from llama_core.backends.parallel import Parallel
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence, Terms
from llama_core.scheduling.sampling_params import Pooling, SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Pending, StepOutput
from tests.support import families
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE
from tests.support.vocabularies import QWEN_SPLIT, byte_level, special, write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES: tuple[Pooling, ...] = ("mean", "last", "first")


def new_runner(parallel: Parallel, directory: str, backend: str, **overrides: Any) -> ModelRunner:
    fields: dict[str, Any] = {"dtype": "float32", "max_step_tokens": 23} | overrides
    fields["backend"] = backend
    config = EngineConfig(directory, VOCAB_SIZE, families.MAX_SEQ_LEN, 8, device="cpu", **fields)
    runner = ModelRunner.load(config, parallel)
    runner.allocate_cache(runner.max_num_blocks())
    return runner


def embedding(prompt: list[int], pooling: Pooling, adapter: str = "") -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=0, pooling=pooling)
    return Sequence(list(prompt), params, len(prompt), terms=Terms(adapter=adapter))


def chat(prompt: list[int], max_tokens: int) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), len(prompt) + max_tokens)


def run(
    runner: ModelRunner, sequences: list[Sequence], preempted_at: Collection[int] = (), **options: Any
) -> Scheduler:
    """All sequences to their ends, together, two steps in flight. preempted_at: the steps after which all are preempted."""
    config, num_blocks = runner.config, runner.max_num_blocks()
    scheduler = Scheduler(SchedulerConfig.of(config, frozenset(), **options), BlockPool(num_blocks, config.block_size))
    for seq in sequences:
        scheduler.add(seq)
    number, in_flight = 0, deque[Pending[StepOutput]]()
    while scheduler.has_work:
        if len(in_flight) < 2 and (batch := scheduler.schedule()) is not None:
            in_flight.append(runner.start(batch))
            number += 1
            while number in preempted_at and scheduler.num_running:
                scheduler._preempt(scheduler._running[-1])
        else:
            scheduler.commit(in_flight.popleft().result())
    return scheduler


def vectors(
    parallel: Parallel, directory: str, backend: str, requests: list[tuple[list[int], Pooling]], **overrides: Any
) -> list[bytes]:
    """The embeddings of requests in one batch."""
    sequences = [embedding(prompt, pooling) for prompt, pooling in requests]
    run(new_runner(parallel, directory, backend, **overrides), sequences)
    assert not any(seq.error for seq in sequences)
    return [seq.embedding or b"" for seq in sequences]


@torch.inference_mode()
def of_transformers(model: "PreTrainedModel", prompt: list[int], pooling: Pooling) -> torch.Tensor:
    """Pooled from `last_hidden_state`, which the final norm has passed."""
    states: torch.Tensor = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].float()
    return {"mean": states.mean(0), "last": states[-1], "first": states[0]}[pooling]


def as_tensor(embedded: bytes | None) -> torch.Tensor:
    assert embedded
    return torch.from_numpy(np.frombuffer(embedded, "<f4").copy())


def write_modules(folder: Path, *kinds: str, **flags: bool) -> None:
    """sentence-transformers' files. flags: of the pooling's modes."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(("Transformer", *kinds))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {f"pooling_mode_{name}": flags.get(name, False) for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **config}))


def write_embedder(folder: Path) -> "PreTrainedModel":
    """A model in the shape of Qwen3-Embedding's: tied embeddings, weights without the prefix "model.", a post-processor that
    appends <|endoftext|>, which is not the EOS of chats, and pooling of the last token, normalized."""
    from transformers import AutoConfig, AutoModel

    folder.mkdir(parents=True)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(CONFIGS["qwen3"] | {"tie_word_embeddings": True}))
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(folder)
    model: PreTrainedModel = AutoModel.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1)
    model.save_pretrained(folder)
    told = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(told | {"architectures": ["Qwen3ForCausalLM"]}))
    tokenizer = byte_level(QWEN_SPLIT, vocab_size=600)
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    end = tokenizer.token_to_id("<|endoftext|>")
    appending = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), appending])
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_folder(folder, tokenizer, names)
    write_modules(folder, "Pooling", "Normalize", lasttoken=True)
    return model
