"""A client that openapi-python-client makes from the OpenAPI document: no warning, then models, a chat and a completion."""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.programs.clients.checks import MODEL, QUESTION, URL, check, run_checks

COMMAND = Path(sys.executable).with_name("openapi-python-client")
PACKAGE = "generated_from_openapi"
DIRECTORY = tempfile.TemporaryDirectory()
sys.path.insert(0, DIRECTORY.name)


def module(name: str) -> Any:
    """A module of the generated package."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def client() -> Any:
    return module("client").Client(base_url=URL, raise_on_unexpected_status=True)


@check
def the_generator_has_nothing_to_warn_of() -> None:
    output = str(Path(DIRECTORY.name) / PACKAGE)
    command = [str(COMMAND), "generate", "--url", f"{URL}/openapi.json", "--meta", "none", "--output-path", output]
    path = f"{COMMAND.parent}:{os.environ['PATH']}"  # the generator calls ruff
    done = subprocess.run(
        [*command, "--fail-on-warning"],
        env={"PATH": path, "HOME": DIRECTORY.name},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=DIRECTORY.name,
    )
    printed = (done.stdout + done.stderr).strip()
    assert (done.returncode, len(printed.splitlines())) == (0, 1), printed[-8000:]


@check
def every_generated_module_can_be_imported() -> None:
    files = list((Path(DIRECTORY.name) / PACKAGE / "api").rglob("*.py"))
    names = [".".join(file.relative_to(Path(DIRECTORY.name) / PACKAGE).with_suffix("").parts) for file in files]
    assert len([module(name) for name in names if not name.endswith("__init__")]) > 10


@check
def a_chat_has_text_usage_and_a_finish_reason() -> None:
    models = module("models")
    message = models.ChatMessage(role=models.ChatMessageRole.USER, content=QUESTION)
    body = models.ChatBody(messages=[message], model=MODEL, temperature=0.0, max_tokens=40)
    answer = module("api.generation.post_v1_chat_completions").sync(client=client(), body=body)
    (choice,) = answer.choices
    assert isinstance(answer, models.ChatCompletion)
    assert choice.message.content and choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def an_error_has_its_class_and_message() -> None:
    body = module("models").CompletionBody(prompt="Question:", temperature=9.0)
    answer = module("api.generation.post_v1_completions").sync(client=client(), body=body)
    assert answer.error.param == "temperature" and answer.error.message


if __name__ == "__main__":
    run_checks()
