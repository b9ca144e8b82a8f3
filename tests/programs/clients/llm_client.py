"""The command `llm`: an OpenAI-compatible model of its configuration, streamed and not, schemas, tools, errors."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.programs.clients.checks import BASE_URL, MODEL, QUESTION, assert_weather, check, run_checks

HOME = tempfile.TemporaryDirectory()
COMMAND = Path(sys.executable).with_name("llm")
(Path(HOME.name) / "extra-openai-models.yaml").write_text(
    f"- {{model_id: demo, model_name: {MODEL}, api_base: '{BASE_URL}', supports_schema: true, supports_tools: true}}\n"
    f"- {{model_id: text, model_name: {MODEL}, api_base: '{BASE_URL}', completion: true}}\n"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = "def multiply(a: int, b: int) -> int:\n    'The product.'\n    return a * b\n"


def llm(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """The finished command, without this repository on its path."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"LLM_USER_PATH": HOME.name, "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [str(COMMAND), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


ASK = ("-m", "demo", "-o", "seed", "1", "-o", "max_tokens", "60")


@check
def the_models_are_listed() -> None:
    assert "demo" in llm("models").stdout


@check
def a_streamed_answer_equals_the_whole() -> None:
    streamed = llm(*ASK, QUESTION).stdout
    assert streamed.strip()
    assert streamed == llm(*ASK, "--no-stream", QUESTION).stdout


@check
def a_completion_answers() -> None:
    assert llm("-m", "text", "-o", "max_tokens", "10", "Question:").stdout.strip()


@check
def a_conversation_goes_on() -> None:
    assert llm(*ASK, "-c", "And 2 + 3?").stdout.strip()


@check
def a_schema_is_followed() -> None:
    assert_weather(llm("-m", "demo", "-o", "max_tokens", "200", "--schema", json.dumps(SCHEMA), QUESTION).stdout)


@check
def usage_is_logged() -> None:
    last = json.loads(llm("logs", "-n", "1", "--json").stdout)[0]
    assert last["input_tokens"] > 0 and last["output_tokens"] > 0, last


@check
def tools_are_offered() -> None:
    # The command has no tool_choice, so the model is free to answer with text.
    assert llm(*ASK, "--functions", FUNCTION, "--chain-limit", "3", QUESTION).returncode == 0


@check
def an_error_is_named() -> None:
    assert "Input tokens exceed" in llm(*ASK, "word " * 5000, status=1).stderr


if __name__ == "__main__":
    run_checks()
