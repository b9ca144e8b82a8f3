"""`llama-ray env`: what it shows, and that it shows no secret."""

import json

import pytest

from cli.env import MASK, settings
from tests.cli.conftest import llama_ray

SECRETS = {
    "LLAMA_API_KEYS": "sk-1,sk-2",
    "OPENAI_API_KEY": "sk-3",
    "RAY_AUTH_TOKEN": "sk-4",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=sk-5",
    "LLAMA_API_KEY_DIGESTS": "sk-6",
    "LLAMA_RAY_URL": "https://user:sk-7@host/v1",
    "LLAMA_RAY_CHAT_API_KEY": "sk-8",
    "LLAMA_RAY_CHAT_QUESTION": "a prompt with sk-9",
    "LLAMA_RAY_CAPTURE_SET": "user=sk-10",
    "LLAMA_RAY_SYSTEM": "sk-11",
}


def test_text_and_json_have_versions_flags_backend_and_settings_without_secrets() -> None:
    done = llama_ray("env", env=SECRETS | {"LLAMA_MAX_SEQ_LEN": "8k"})
    assert done.returncode == 0 and "sk-" not in done.stdout
    for word in ("ray: 2.", "torch: 2.", "cpu_flags:", "native:", "LLAMA_MAX_SEQ_LEN: 8k"):
        assert word in done.stdout, word
    done = llama_ray("env", "--json", env=SECRETS)
    found = json.loads(done.stdout)
    assert set(found) == {"system", "machine", "backend", "packages", "settings"} and "sk-" not in done.stdout
    assert found["settings"]["LLAMA_RAY_URL"] == "https://***@host/v1"


@pytest.mark.parametrize(
    "name",
    [
        "LLAMA_MAX_QUEUE_TOKENS",
        "LLAMA_TOKENIZER_PATH",
        "LLAMA_RAY_BENCH_PROMPT_TOKENS",
        "LLAMA_API_KEY_FILE",
        "OMP_NUM_THREADS",
    ],
)
def test_names_that_only_look_like_secrets_are_shown(name: str) -> None:
    assert settings({name: "7"}) == {name: "7"}


def test_variables_of_others_are_left_out() -> None:
    assert settings({"HOME": "x", "AWS_SECRET": "y", "LLAMA_API_KEYS": "z"}) == {"LLAMA_API_KEYS": MASK}
