"""Small random models of each family of Llamas, written by transformers, with transformers' own greedy tokens and logits.

`check` runs one on a backend and returns how far it is from them. It runs on every rank of a group.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from llama_core.backends.parallel import Parallel
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LLAMA = CONFIGS["llama2"]
# By name: a config.json. Windows have 24 positions, rope types an original context of 32 or 64.
FAMILIES: Mapping[str, dict[str, Any]] = {
    **CONFIGS,
    "llama3": _LLAMA | {"rope_theta": 500000.0},
    "code-llama": _LLAMA | {"rope_theta": 1e6, "num_key_value_heads": 8},
    "llama-dynamic": CONFIGS["llama-dynamic"] | {"max_position_embeddings": 64},
    "llama-yarn": _LLAMA
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "r1-distill-llama": CONFIGS["llama3.1"] | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2},
    "r1-distill-qwen": CONFIGS["qwen2"] | {"tie_word_embeddings": False, "use_sliding_window": False},
}
# One of each model_type, and beside them every switch, the rope types, and parts that 2 and 3 ranks do not divide.
DISTINCT = tuple(
    {
        **{config.get("text_config", config)["model_type"]: name for name, config in reversed(list(FAMILIES.items()))},
        **{
            name: name
            for name in ("llama3.2", "llama-biases", "llama-dynamic", "smollm2", "qwen2-window", "qwen2-yarn")
        },
    }.values()
)
MAX_SEQ_LEN = 128
NUM_TOKENS = 6  # generated after each prompt
LONG = 200  # tokens
# One prompt is longer than every window and every original context, one shorter.
PROMPTS = ([1 + i * 37 % 600 for i in range(90)], [7, 300, 41, 8])


class Expected(NamedTuple):
    """For each prompt, greedy tokens, and the logits [tokens, vocab] from which they are taken."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


def write(directory: Path, name: str, shard_size: str = "10GB") -> Expected:
    """Write a random model of the family, as transformers saves it."""
    return continued(new_model(directory, name, shard_size))


def new_model(directory: Path, name: str, shard_size: str = "10GB", seed: int = 0) -> "PreTrainedModel":
    """A random model of the family, of which transformers writes the files."""
    # Takes seconds, and ranks do without it.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(FAMILIES[name]))
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForImageTextToText if "text_config" in FAMILIES[name] else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape)
        # The next token must depend on all previous ones. Norms whose factors are 1 + weight begin with zeros.
        has_ones = parameter.ndim == 1 and bool(parameter.any())
        parameter.data = 1 + 0.2 * values if has_ones else 0.2 * values
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def continued(model: "PreTrainedModel") -> Expected:
    """What the model of transformers generates after each of PROMPTS."""
    tokens, logits = zip(*(_continue(model, prompt) for prompt in PROMPTS), strict=True)
    return Expected(list(tokens), list(logits))


@torch.inference_mode()
def _continue(model: "PreTrainedModel", prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy, by a forward without a cache over MAX_SEQ_LEN positions: a length that fixes the base of dynamic rope. Positions
    behind the text do not change it."""
    text, logits = list(prompt), []
    for _ in range(NUM_TOKENS):
        padded = torch.tensor([text + [0] * (MAX_SEQ_LEN - len(text))])
        logits.append(model(padded, use_cache=False).logits[0, len(text) - 1].float())
        text.append(int(logits[-1].argmax()))
    return text[len(prompt) :], torch.stack(logits)


@torch.inference_mode()
def logits_error(model: "PreTrainedModel", got: Expected) -> float:
    """The largest difference of a logit from those of transformers before each token. Raises AssertionError for a token that
    transformers would not have generated."""
    worst = 0.0
    for prompt, tokens, logits in zip(PROMPTS, *got, strict=True):
        text = prompt + tokens
        expected = model(torch.tensor([text]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        assert expected.argmax(-1).tolist() == tokens
        assert expected.argmax(-1).tolist() == tokens
        worst = max(worst, (logits - expected).abs().max().item())
    return worst


def run(
    parallel: Parallel, directory: str, backend: str, num_tokens: int = NUM_TOKENS, max_seq_len: int = MAX_SEQ_LEN
) -> Expected:
    """What this rank's backend generates: prompts in chunks, one of them beside the other's tokens, decodes together."""
    config = EngineConfig(
        directory,
        VOCAB_SIZE,
        max_seq_len,
        16,  # with windows, the cache of fewer sequences would be shorter than a prompt
        64,
        device="cpu",
        dtype="float32",
        backend=backend,  # type: ignore[arg-type]
    )
    runner = ModelRunner.load(config, parallel)
    runner.allocate_cache(runner.max_num_blocks())
    num_blocks, greedy = config.blocks_per_sequence, SamplingParams(temperature=0.0, logprobs=0)
    admit = [
        SlotInit(slot, prompt, list(range(slot * num_blocks, (slot + 1) * num_blocks))[::-1], greedy)
        for slot, prompt in enumerate(PROMPTS)
    ]
    long, short = (len(prompt) for prompt in PROMPTS)
    steps = [[Row(0, 0, 50, False)], [Row(0, 50, long - 50, True), Row(1, 0, short, True)]]
    steps += [[Row(0, long + i, 1, True), Row(1, short + i, 1, True)] for i in range(num_tokens - 1)]
    tokens: list[list[int]] = [[], []]
    logits: list[list[torch.Tensor]] = [[], []]
    for rows in steps:
        output = runner.step(StepInput(0, 0, rows, admit=admit))
        admit = []
        for i, token in enumerate(output.tokens):
            tokens[i].append(token)
            logits[i].append(runner.backend.logits_of_samples([i])[0].clone())
    return Expected(tokens, [torch.stack(rows) for rows in logits])


def difference(got: Expected, expected: Expected) -> float:
    """The largest difference of a logit. Raises AssertionError for another token."""
    assert got.tokens == expected.tokens
    pairs = zip(got.logits, expected.logits, strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)
