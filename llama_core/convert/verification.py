"""Compares the logits that two checkpoints give for the same prompt."""

from pathlib import Path

import torch

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.checkpoint.source import CheckpointSource
from llama_core.config import DType, EngineConfig
from llama_core.convert.quantized import QuantizedSource
from llama_core.execution.parallel import alone
from llama_core.execution.runner import ModelRunner
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput

_LENGTH = 32


def prompt_logits(
    checkpoint: Path, num_ids: int, dtype: DType, quantization: str = "none", source: CheckpointSource | None = None
) -> torch.Tensor:
    """The logits after each token of a fixed prompt: float32 [tokens, vocabulary]. Loads the model on the CPU.

    source: reads the checkpoint in another way than `open_checkpoint`.
    """
    config = EngineConfig(
        ckpt_dir=str(checkpoint),
        vocab_size=num_ids,
        max_seq_len=2 * _LENGTH,
        max_batch_size=1,
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        verify_checksums=False,
    )
    runner = ModelRunner.load(config, alone("cpu"), source=source)
    num_blocks = runner.max_num_blocks()
    runner.allocate_cache(num_blocks)
    tokens = [(1 + 7919 * i) % num_ids for i in range(_LENGTH)]
    blocks = list(range(config.blocks_per_sequence))
    init = SlotInit(slot=0, tokens=tokens, blocks=blocks, params=SamplingParams(temperature=0.0))
    runner.step(StepInput(epoch=0, step=0, rows=[Row(0, 0, _LENGTH, True)], admit=[init]))
    return runner.backend.logits_of_tokens(range(_LENGTH)).clone()


def largest_difference(
    source: Path, target: Path, num_ids: int, dtype: DType, weight_format: str | None = None
) -> float:
    """The largest difference of a logit between the two checkpoints. One of them is in memory at a time.

    weight_format: of the groups that `target` stores, to which the weights of `source` are quantized while they load.
    """
    if weight_format is None:
        expected = prompt_logits(source, num_ids, dtype)
        return float((prompt_logits(target, num_ids, dtype) - expected).abs().max())
    quantized = QuantizedSource(open_checkpoint(source), weight_format)
    expected = prompt_logits(source, num_ids, dtype, "auto", quantized)
    return float((prompt_logits(target, num_ids, dtype, "auto") - expected).abs().max())
