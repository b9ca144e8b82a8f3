"""Which modules each folder may import, and which libraries it may not load. `tests/test_rooms.py` checks it."""

from collections.abc import Mapping

PRODUCT = ("llama_core", "cluster", "deployments", "cli")
PACKAGES = (*PRODUCT, "benchmarks", "tests")

# A room is a module, or a folder without the modules and folders that are rooms of their own. The table names, for each room,
# the rooms that it may import beside itself.
BASE = (
    "llama_core",
    "llama_core.errors",
    "llama_core.host_memory",
    "llama_core.model_config",
    "llama_core.checkpoint",
    "llama_core.shared_cache",
)
LOG_LINES = "llama_core.log_lines"
FORMATS = "llama_core.execution.weight_formats.registry"  # names of weight formats, without tensors
REPORT = "llama_core.execution.rank_report"
GRAMMAR = "llama_core.grammar"
PURE = (*BASE, LOG_LINES, FORMATS, REPORT, "llama_core.config", "llama_core.text", "llama_core.scheduling", GRAMMAR)
MODEL = (*PURE, "llama_core.checkpoint.loader", "llama_core.execution")
BACKENDS = ("llama_core.execution.fused", "llama_core.execution.native")
FAIRSCALE = "llama_core.execution.fused.fairscale_layers"  # imported where ranks share a model in plain torch
CHOICE = "llama_core.execution.backend_choice"
LOADING = "llama_core.execution.rank_loading"
CORE = (
    *MODEL, *BACKENDS, CHOICE, LOADING, "llama_core.execution.runner", "llama_core.execution.verify_files",
)  # fmt: skip
REPLICA = (
    "deployments",
    "deployments.args",
    "deployments.engine",
    "cluster.driver",
    "cluster.wire",
    "llama_core.results",
    *PURE,
)
ROOMS: Mapping[str, tuple[str, ...]] = {
    # Loaded by every process: no tensors.
    "llama_core": ("llama_core.generation",),  # `Llama`, imported on first use
    "llama_core.errors": (),
    "llama_core.host_memory": ("llama_core.errors",),
    "llama_core.sizes": (),
    "llama_core.host_cpu": (),
    "llama_core.log_lines": (),
    "llama_core.shared_cache": (),
    "llama_core.model_config": ("llama_core.errors",),
    "llama_core.checkpoint": ("llama_core.errors", "llama_core.host_memory", "llama_core.model_config"),
    FORMATS: (),
    REPORT: ("llama_core.checkpoint",),
    "llama_core.config": (*BASE, FORMATS),
    "llama_core.text": (*BASE, LOG_LINES),
    GRAMMAR: (*BASE, LOG_LINES, "llama_core.text", "llama_core.scheduling"),
    "llama_core.scheduling": (*BASE, LOG_LINES, "llama_core.config"),
    # Loaded by ranks.
    "llama_core.checkpoint.loader": BASE,
    "llama_core.checkpoint.mapped": BASE,
    "llama_core.checkpoint.meta_weights": (*BASE, "llama_core.checkpoint.mapped"),
    "llama_core.checkpoint.hf_weights": (*BASE, "llama_core.checkpoint.mapped"),
    "llama_core.checkpoint.gguf_weights": (*BASE, "llama_core.checkpoint.mapped"),
    "llama_core.checkpoint.meta": (*BASE, "llama_core.checkpoint.meta_weights"),  # imported when weights are opened
    "llama_core.checkpoint.hugging_face": (*BASE, "llama_core.checkpoint.hf_weights"),
    "llama_core.checkpoint.gguf": (*BASE, "llama_core.checkpoint.gguf_weights"),
    "llama_core.execution": (
        *BASE,
        FORMATS,
        REPORT,
        "llama_core.config",
        "llama_core.scheduling",
        "llama_core.checkpoint.loader",
    ),
    "llama_core.execution.fused": MODEL,
    FAIRSCALE: (*MODEL, "llama_core.execution.fused"),
    "llama_core.execution.native": MODEL,
    "llama_core.execution.verify_files": MODEL,
    CHOICE: (*MODEL, *BACKENDS),
    LOADING: (*MODEL, *BACKENDS, FAIRSCALE, CHOICE, "llama_core.execution.verify_files"),
    "llama_core.execution.runner": (*MODEL, LOADING),
    # Users of the core in one process.
    "llama_core.results": PURE,
    "llama_core.batch_loop": CORE,
    "llama_core.generation": (*CORE, "llama_core.batch_loop", "llama_core.results"),
    "llama_core.memory_estimate": CORE,  # plans a rank's memory as the runner does, before anything is loaded
    # cluster: the driver runs in the replica, rank in the rank actors, wire in both.
    "cluster": (),
    "cluster.deploy": (),
    "cluster.wire": PURE,
    "cluster.rank": ("cluster", "cluster.wire", *CORE),
    "cluster.driver": ("cluster", "cluster.wire", *PURE),
    # deployments: the replica's process, and the command on the user's machine.
    "deployments": (),
    "deployments.http.errors": ("deployments", *PURE),
    "deployments.http.request_headers": ("deployments", *PURE),
    "deployments.http.request_id": (
        "deployments",
        "deployments.http.errors",
        "deployments.http.request_headers",
        *PURE,
    ),
    "deployments.serve_headers": ("deployments", "deployments.http.errors", "deployments.http.request_id", *PURE),
    "deployments.api_keys": ("deployments", "deployments.http.errors", *PURE),
    "deployments.args": ("deployments", "deployments.http.errors", "deployments.api_keys", "llama_core.sizes", *PURE),
    "deployments.engine": tuple(room for room in REPLICA if room != "deployments.engine"),
    "deployments.tracing": REPLICA,
    "deployments.http": (
        *REPLICA,
        "llama_core.host_cpu",
        "deployments.tracing",
        "deployments.http.errors",
        "deployments.http.request_headers",
        "deployments.http.request_id",
        "deployments.serve_headers",
        "deployments.api_keys",
    ),
    "deployments.local": (
        *REPLICA,
        "llama_core.memory_estimate",
        "llama_core.sizes",
        "deployments.http",
        "deployments.http.errors",
        "deployments.api_keys",
    ),
    "deployments.handle_types": (*REPLICA, "deployments.http"),
    "deployments.handle_plans": (*REPLICA, "deployments.handle_types", "deployments.http"),
    "deployments.handle_call": (*REPLICA, "deployments.handle_types", "deployments.tracing", "deployments.http"),
    "deployments.handle_api": (
        *REPLICA,
        "deployments.tracing",
        "deployments.handle_call",
        "deployments.handle_plans",
        "deployments.handle_types",
        "deployments.http",
        "deployments.http.errors",
        "deployments.api_keys",
    ),
    "deployments.replica_log": (
        *REPLICA,
        "deployments.api_keys",
        "deployments.http",
        "deployments.http.errors",
    ),
    "deployments.ingress": (
        *REPLICA,
        "deployments.tracing",
        "deployments.api_keys",
        "deployments.handle_api",
        "deployments.replica_log",
        "deployments.http",
        "deployments.http.errors",
        "deployments.local",
    ),
    "deployments.app": (*REPLICA, "deployments.ingress", "deployments.api_keys", "deployments.local"),
    "cli": (
        *REPLICA,
        "llama_core.sizes",
        "llama_core.host_cpu",
        "llama_core.memory_estimate",
        "llama_core.execution",  # `estimate` plans a GPU's memory as a rank does
        "llama_core.execution.native",  # `doctor` builds the library
        "deployments.local",
        "deployments.app",
        "deployments.http",
    ),
    "deployments.up": ("deployments", "deployments.local", "cli"),
}
# Each module of these folders has a row of its own, because their positions in the order differ.
ONLY_THEIR_INIT = ("llama_core", "deployments")
# Libraries that a room never loads: not even through another library, when each of its modules is imported.
HTTP = ("fastapi", "starlette", "pydantic")
NEVER_LOADED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama_core": (("llama_core",), ("ray", "msgspec", *HTTP)),
    "without tensors": (
        (
            "llama_core.errors",
            "llama_core.config",
            "llama_core.results",
            "llama_core.host_memory",
            "llama_core.host_cpu",
            "llama_core.text",
            "llama_core.scheduling",
            "llama_core.model_config",
            "llama_core.checkpoint.digest",
            "llama_core.checkpoint.files",
            "llama_core.checkpoint.manifest",
            "llama_core.checkpoint.hf_config",
            "llama_core.checkpoint.hf_files",
            "llama_core.checkpoint.hf_rope",
            "llama_core.checkpoint.hugging_face",
            "llama_core.checkpoint.json_fields",
            "llama_core.checkpoint.meta",
            "llama_core.checkpoint.registry",
            "llama_core.checkpoint.source",
            "llama_core.checkpoint.weights",
            FORMATS,
            REPORT,
        ),
        ("torch", "fairscale", "ray"),
    ),
    "fast backends": (
        ("llama_core.execution.fused", "llama_core.execution.native", "llama_core.execution.runner"),
        ("fairscale",),
    ),
    "driver and wire": (("cluster.driver", "cluster.wire"), ("torch", "fairscale", "fastapi")),
    "replica": (("deployments", "cli"), ("torch", "fairscale")),
}
# Rules that one process checks, one after the other: importing takes seconds, and no rule bans what one before it may load.
PROCESSES = (("without tensors", "driver and wire", "replica"), ("fast backends", "llama_core"))
# Libraries that no file of a package imports directly.
NEVER_IMPORTED: Mapping[str, tuple[str, ...]] = {"llama_core": ("ray", "msgspec", *HTTP), "cluster": HTTP}
# Modules that only a machine with a GPU, or a command, can import, and the one for fairscale.
NOT_IMPORTED_HERE = ("__main__", "kernels", "fairscale_layers")
