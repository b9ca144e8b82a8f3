"""The clients and the versions that are run against the server."""

from dataclasses import dataclass
from typing import Final, Literal

TORCH: Final = "torch==2.13.0"  # exact, so that pip takes the CPU build where it finds one
Kind = Literal["python", "node", "command"]


@dataclass(frozen=True, slots=True)
class Client:
    """One program and what it needs.

    kind: `python` runs in a virtual environment, `node` in a folder with node_modules, `command` in this environment.
    program: a module of this folder, or a file for `node`.
    requirements: of pip or npm, each with an exact version. The first one is what the table of results names.
    without_dependencies: requirements of pip that are installed without what they require.
    needs: an executable that is not installed by this program.
    """

    program: str
    requirements: tuple[str, ...]
    kind: Kind = "python"
    without_dependencies: tuple[str, ...] = ()
    needs: str | None = None
    limit_s: float = 300.0


AI_SDK = ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
# What `vllm bench serve` imports; the package's own requirements include CUDA's libraries.
VLLM_BENCH = (
    *(TORCH, "transformers==5.20.0", "xgrammar==0.2.8", "llguidance>=1.7,<1.8", "fastapi[standard]>=0.133,<0.137"),
    *("aiohttp", "cachetools", "cbor2", "cloudpickle", "datasets", "einops", "mistral_common", "msgspec"),
    *("openai==3.54.0", "opentelemetry-exporter-otlp", "opentelemetry-sdk", "orjson", "oss-harmony", "pandas"),
    *("partial-json-parser", "pillow", "prometheus-fastapi-instrumentator", "protobuf", "psutil", "py-cpuinfo"),
    *("pybase64", "pyzmq", "sentencepiece", "uvloop"),
)

CLIENTS: Final[dict[str, Client]] = {
    "openai-1": Client("openai_python", ("openai==1.109.1",)),
    "openai-2": Client("openai_python", ("openai==2.54.0",)),
    "openai-3": Client("openai_python", ("openai==3.54.0",)),
    "openai-node": Client("openai_node.mjs", ("openai@7.57.0", "zod@4.6.7"), "node", needs="npm"),
    "anthropic": Client("anthropic_python", ("anthropic==2.12.0",)),
    "langchain": Client("langchain_chat", ("langchain-openai==1.7.3", "langchain==1.4.7")),
    "litellm": Client("litellm_client", ("litellm==1.106.2", "mcp==2.3.0")),
    "instructor": Client("instructor_client", ("instructor==1.17.0",)),
    "pydantic-ai": Client("pydantic_ai_client", ("pydantic-ai-slim[openai]==2.68.0",)),
    "openai-agents": Client("openai_agents", ("openai-agents==0.24.0",)),
    "ai-sdk": Client("ai_sdk.mjs", AI_SDK, "node", needs="npm"),
    "llm": Client("llm_client", ("llm==0.36",)),
    "lm-eval": Client("lm_eval_client", ("lm-eval[api]==0.4.13",), limit_s=900),
    "guidellm": Client("guidellm_client", ("guidellm==0.8.1", TORCH), limit_s=600),
    "vllm-bench": Client(
        "vllm_bench", ("vllm==0.33.0", *VLLM_BENCH), without_dependencies=("vllm==0.33.0",), limit_s=600
    ),
    "schemathesis": Client("schemathesis_run", ("schemathesis==4.32.5",), limit_s=900),
    "generated": Client("generated_client", ("openapi-python-client==0.29.1",)),
}
