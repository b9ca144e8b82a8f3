"""Sections in a tiny form on the CPU, and a process that lacks libraries."""

import os
import subprocess
import sys

from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

TINY = Settings("cpu", "tiny", "float32", vocab_size=300, is_tiny=True)
# What a machine for measurements may lack.
ABSENT = (
    *("ray", "msgspec", "pydantic", "fastapi", "llguidance", "tqdm", "jinja2"),
    *("tokenizers", "sentencepiece", "tiktoken", "safetensors", "gguf", "fairscale"),
    *("hypothesis", "pytest_asyncio", "pytest_timeout", "rich", "typer", "yaml", "scipy"),
)
BLOCKED = f"""
import sys
from importlib.machinery import PathFinder
class Fewer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Fewer
"""


def run_without_libraries(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that cannot import ABSENT."""
    command = [sys.executable, "-c", BLOCKED + code, *words]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)
