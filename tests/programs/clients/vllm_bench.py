"""`vllm bench serve` over completions and chat, with prompts of a file and a small tokenizer made here."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.programs.clients.checks import MODEL, QUESTION, URL, check, completed, run_checks

NUM_PROMPTS, NUM_TOKENS = 12, 16
COMMAND = Path(sys.executable).with_name("vllm")


def save_tokenizer(folder: Path) -> None:
    """A token a byte. Without a tokenizer the command asks for one token a prompt."""
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def bench(backend: str, endpoint: str, *options: str) -> dict[str, Any]:
    """The result that the command saves."""
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{i}. {QUESTION}"}) + "\n" for i in range(NUM_PROMPTS)))
        save_tokenizer(Path(directory))
        command = [
            *(str(COMMAND), "bench", "serve", "--backend", backend, "--base-url", URL, "--endpoint", endpoint),
            *("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", str(NUM_TOKENS)),
            *("--num-prompts", str(NUM_PROMPTS), "--tokenizer", directory, "--skip-chat-template", "--ignore-eos"),
            *("--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", directory),
            *("--result-filename", "result.json", *options),
        ]
        completed(*command, timeout_s=280, folder=directory)
        result: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
    return result


def complete(result: dict[str, Any]) -> None:
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), result["errors"]
    assert result["output_lens"] == [NUM_TOKENS] * NUM_PROMPTS, result["output_lens"]
    assert result["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert all(time > 0 for time in result["ttfts"]), result["ttfts"]
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0


@check
def completions_without_a_models_name_have_every_token() -> None:
    result = bench("openai", "/v1/completions")
    assert result["model_id"] == MODEL
    complete(result)


@check
def chats_have_every_token() -> None:
    complete(bench("openai-chat", "/v1/chat/completions", "--model", MODEL, "--max-concurrency", "4"))


if __name__ == "__main__":
    run_checks()
