"""Which folders each folder may import, and which libraries it may not load. `tests/test_rooms.py` checks it."""

from collections.abc import Mapping

PRODUCT = ("llama_core", "cluster", "deployments", "cli")
PACKAGES = (*PRODUCT, "benchmarks", "tests")

# A room is a folder with the folders below it, or a module at the top of a package whose place in the order is its own. The
# table names, for each room, the rooms that it may import.
FILES = ("llama_core", "llama_core.host", "llama_core.model", "llama_core.files")
CONFIG = (*FILES, "llama_core.config", "llama_core.rank_report")
TEXT = (*CONFIG, "llama_core.text", "llama_core.scheduling", "llama_core.grammar")
FORMATS = ("llama_core.weights", "llama_core.checkpoint", "llama_core.remote")
CORE = (*TEXT, *FORMATS, "llama_core.backends")
LLAMA = ("llama_core.results", "llama_core.batch_loop")
REPLICA = (*TEXT, *FORMATS, "cluster.wire", "cluster.driver", "deployments.args", "deployments.api_keys")
ANSWERS = (*REPLICA, "deployments.engine", "deployments.openai", "deployments.observe", "deployments.http")
ROOMS: Mapping[str, tuple[str, ...]] = {
    "llama_core": ("llama_core.generation",),  # `Llama`, imported on first use
    "llama_core.host": ("llama_core",),
    "llama_core.model": ("llama_core",),
    "llama_core.files": ("llama_core", "llama_core.host", "llama_core.model"),
    "llama_core.remote": (*CONFIG, "llama_core.text"),
    "llama_core.weights": (*FILES, "llama_core.remote"),
    "llama_core.checkpoint": (*FILES, "llama_core.weights"),
    "llama_core.config": FILES,
    "llama_core.rank_report": FILES,
    "llama_core.text": CONFIG,
    "llama_core.scheduling": CONFIG,
    "llama_core.grammar": (*CONFIG, "llama_core.text", "llama_core.scheduling"),
    "llama_core.backends": (*TEXT, *FORMATS),
    "llama_core.results": TEXT,
    "llama_core.batch_loop": CORE,
    "llama_core.backends.memory_estimate": CORE,
    "llama_core.generation": (*CORE, *LLAMA),
    # wire runs in the replica and in the rank actors, driver in the replica, rank in the rank actors.
    "cluster": (),
    "cluster.wire": (*TEXT, "llama_core.remote"),
    "cluster.driver": (*TEXT, "llama_core.remote", "cluster.wire"),
    "cluster.rank": (*CORE, "cluster.wire"),
    # The replica's process, and the command on the user's machine.
    "deployments.api_keys": FILES,
    "deployments.args": (*TEXT, "llama_core.checkpoint", "llama_core.remote", "deployments.api_keys"),
    "deployments.engine": REPLICA,
    "deployments.links": (*REPLICA, "deployments.engine"),
    "deployments.fleet": (*REPLICA, "deployments.engine", "deployments.links"),
    "deployments.openai": (*REPLICA, "deployments.engine"),
    "deployments.observe": (*REPLICA, "deployments.engine", "deployments.openai"),
    "deployments.http": (*REPLICA, "deployments.engine", "deployments.openai", "deployments.observe"),
    "deployments.local": (*REPLICA, "llama_core.backends.memory_estimate"),
    "deployments.handle_types": (*ANSWERS, "llama_core.results"),
    "deployments.handle": (*ANSWERS, "deployments.handle_types", "llama_core.results"),
    "deployments.replicas": (
        *ANSWERS,
        "deployments.links",
        "deployments.fleet",
        "deployments.local",
        "deployments.handle",
    ),
    "deployments": (*ANSWERS, "deployments.local", "deployments.replicas"),
    "cli": (*REPLICA, "llama_core.backends", "llama_core.backends.memory_estimate", "deployments", "deployments.local"),
}
# What benchmarks import of tests: the loop with a virtual clock, and the fleet in it.
OF_TESTS = tuple(
    f"tests.support.{name}" for name in ("fake_cluster", "fake_rank_group", "modelled_fleet", "virtual_loop")
)
# Libraries that a room never loads: not even through another library, when each of its modules is imported.
WEB = ("fastapi", "starlette", "pydantic")
NEVER_LOADED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama_core": (("llama_core",), ("ray", "msgspec", *WEB)),
    "without tensors": (
        ("llama_core.errors", "llama_core.files", "llama_core.config", "llama_core.text", "llama_core.scheduling"),
        ("torch", "fairscale", "ray"),
    ),
    "fast backends": (("llama_core.backends",), ("fairscale",)),
    "driver and wire": (("cluster.driver", "cluster.wire"), ("torch", "fairscale", "fastapi")),
    "replica": (("deployments", "cli"), ("torch", "fairscale")),
    "engine": (("deployments.replicas.engine",), ("deployments.http", "deployments.openai", "deployments.handle")),
}
# Rules that one process checks, one after the other: importing takes seconds, and no rule bans what one before it may load.
PROCESSES = (("without tensors", "driver and wire", "engine", "replica"), ("fast backends", "llama_core"))
# Libraries that no file of a package imports directly.
NEVER_IMPORTED: Mapping[str, tuple[str, ...]] = {"llama_core": ("ray", "msgspec", *WEB), "cluster": WEB}
# Modules that only a machine with a GPU, or a command, can import, and the one for fairscale.
NOT_IMPORTED_HERE = ("__main__", "kernels", "fairscale_layers")
