"""What a request's tokens depend on beside the request: the model's files, versions, settings and the CPU."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import metadata
from typing import Any, Final

from deployments.engine.interface import EngineState
from llama_core.host_cpu import cpu_flags, cpu_name

PACKAGES: Final = ("ray", "torch", "llguidance", "tokenizers", "sentencepiece", "jinja2")
CPU_FLAGS: Final = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve")


@cache
def versions() -> Mapping[str, str]:
    """Of the server, Python and the libraries; "absent" for one that is not installed."""
    found = {"llama-on-ray": _version("llama-on-ray"), "python": platform.python_version()}
    return found | {package: _version(package) for package in PACKAGES}


def model_facts(state: EngineState) -> dict[str, Any]:
    """digest: one SHA-256 of all files of the checkpoint; "" while no ranks have loaded it."""
    return {"id": state.model, "digest": state.checkpoint_digest, "format": state.checkpoint_format}


def settings(state: EngineState) -> dict[str, Any]:
    """Those that the tokens may depend on. devices and dtypes: of the ranks, each named once."""
    return {
        "ranks": state.world_size,
        "devices": sorted({rank.device for rank in state.ranks}),
        "dtypes": sorted({rank.dtype for rank in state.ranks}),
        "max_seq_len": state.max_seq_len,
        "chat_format": state.chat_format,
        "tool_format": state.tool_format,
        "stop_tokens": list(state.stop_tokens),
        "sampling_defaults": asdict(state.sampling_defaults),
    }


@cache
def cpu() -> Mapping[str, Any]:
    """Of the replica's machine, which is also that of the ranks unless these are on other nodes."""
    return {"name": cpu_name(), "flags": cpu_flags(CPU_FLAGS)}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
