"""The command `llm`: an OpenAI-compatible model of its configuration, streamed and not, schemas, tools, errors."""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.programs.clients.checks import (
    BASE_URL,
    MODEL,
    QUESTION,
    WEATHER,
    assert_weather,
    check,
    completed,
    run_checks,
)

HOME = tempfile.TemporaryDirectory()
COMMAND = Path(sys.executable).with_name("llm")
(Path(HOME.name) / "extra-openai-models.yaml").write_text(
    f"- {{model_id: demo, model_name: {MODEL}, api_base: '{BASE_URL}', supports_schema: true, supports_tools: true}}\n"
    f"- {{model_id: text, model_name: {MODEL}, api_base: '{BASE_URL}', completion: true}}\n"
)
os.environ |= {"LLM_USER_PATH": HOME.name, "OPENAI_API_KEY": "none"}
FUNCTION = "def multiply(a: int, b: int) -> int:\n    'The product.'\n    return a * b\n"


def llm(*arguments: str, status: int = 0) -> str:
    return completed(str(COMMAND), *arguments, timeout_s=120, status=status)


ASK = ("-m", "demo", "-o", "seed", "1", "-o", "max_tokens", "60")


@check
def a_streamed_answer_equals_the_whole() -> None:
    streamed = llm(*ASK, QUESTION)
    assert streamed.strip()
    assert streamed == llm(*ASK, "--no-stream", QUESTION)


@check
def a_completion_answers() -> None:
    assert llm("-m", "text", "-o", "max_tokens", "10", "Question:").strip()


@check
def a_schema_is_followed() -> None:
    assert_weather(llm("-m", "demo", "-o", "max_tokens", "200", "--schema", json.dumps(WEATHER), QUESTION))


@check
def usage_is_logged() -> None:
    last = json.loads(llm("logs", "-n", "1", "--json"))[0]
    assert last["input_tokens"] > 0 and last["output_tokens"] > 0, last


@check
def tools_are_offered() -> None:
    # The command has no tool_choice, so the model is free to answer with text.
    llm(*ASK, "--functions", FUNCTION, "--chain-limit", "3", QUESTION)


@check
def an_error_is_named() -> None:
    assert "Input tokens exceed" in llm(*ASK, "word " * 5000, status=1)


if __name__ == "__main__":
    run_checks()
