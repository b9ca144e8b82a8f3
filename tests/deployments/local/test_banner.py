"""The banner says what is served: files and format, the context and its reason, and each rank's share."""

from typing import Any

import pytest

from deployments.local.banner import banner, base_url
from llama_core.model_config import ModelConfig
from llama_core.rank_share import RankShare

SMOLLM2 = ModelConfig(576, 30, 9, 3, 64, 1536, 49_152)


def props(num_ranks: int = 2, **changes: Any) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "device": "cpu (1 thread), native avx2",
            "dtype": "bfloat16 with int4_min weights",
            "weight_bytes": 61_000_000,
            "share": RankShare.of(SMOLLM2, rank, num_ranks).describe(SMOLLM2),
        }
        for rank in range(num_ranks)
    ]
    return {
        "model": "smollm2",
        "world_size": num_ranks,
        "ranks": ranks,
        "max_seq_len": 8192,
        "max_seq_len_reason": "the model's context",
        "checkpoint_format": "gguf",
        "chat_format": "template",
        "stop_tokens": ("<|endoftext|>", "<|im_end|>"),
    } | changes


def test_the_banner_says_what_is_served_and_what_share_each_rank_has() -> None:
    lines = banner(props(), "127.0.0.1", 8000).splitlines()
    assert "    model    smollm2 (GGUF; bfloat16 with int4_min weights)" in lines
    assert "    context  max_seq_len 8,192, the model's context" in lines
    assert "    format   template; an answer ends at <|endoftext|>, <|im_end|>" in lines
    assert "    ranks    2: each on cpu (1 thread), native avx2" in lines
    share = "3 of 9 heads, 1 of 3 kv heads, 768 of 1,536 hidden units, 24,576 of 49,152 vocabulary rows; 61 MB"
    assert f"             rank 0: {share}" in lines, "the share that RankShare computes"
    assert "rank 1: 6 of 9 heads, 2 of 3 kv heads" in "\n".join(lines)


def test_only_the_demos_banner_names_the_command_for_a_real_model() -> None:
    assert "make serve MODEL=smollm2" in banner(props(model="llama-demo"), "127.0.0.1", 8000)
    assert "make serve" not in banner(props(), "127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::0", "127.0.0.1"),
        ("::1", "[::1]"),
        ("llama.example", "llama.example"),
    ],
)
def test_the_address_is_one_that_a_client_on_this_machine_can_use(host: str, name: str) -> None:
    assert base_url(host, 8000) == f"http://{name}:8000"
