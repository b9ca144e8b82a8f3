"""The native engine's builds for other instruction sets than this CPU's, which tests of its bits compare.

`python tests/support/native_builds.py` makes those of each run, with --full all: `make test` runs it beside the set-up, so it
needs no package.
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

FLAGS = ("", "-DLLAMA_NO_AMX", "-march=skylake-avx512", "-march=x86-64-v3", "-march=x86-64-v2")
HAS_AVX512 = platform.machine() == "x86_64" and "avx512f" in Path("/proc/cpuinfo").read_text()
# This CPU's and AVX2: where this CPU has no AVX-512, its own build is one of AVX2. AVX-512 without VNNI multiplies weights in
# another way, which tests/llama_core/backends/test_weight_products.py compares.
IN_EACH_RUN = ("", "-march=x86-64-v3") if HAS_AVX512 else ("",)
_BUILD = Path(__file__).parents[2] / "llama_core" / "backends" / "native" / "build.py"


def unsupported_reason(flags: str) -> str | None:
    """Why this CPU cannot run a build with these flags; None if it can."""
    if flags and platform.machine() != "x86_64":
        return "these are flags for x86-64"
    if "skylake" in flags and not HAS_AVX512:
        return "this CPU has no AVX-512"
    return None


def variables(flags: str) -> dict[str, str]:
    """Environment variables of a process that uses the build. Servers' builds have another directory, whose lock they share."""
    if not flags:
        return {}
    return {"LLAMA_CXXFLAGS": flags, "LLAMA_CACHE_DIR": str(cache_of_tests())}


def cache_of_tests() -> Path:
    """The folder of what tests compile, which later runs find again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-ray-tests"


def _load_build() -> ModuleType:
    """The module that builds the engine, without its package, which loads torch."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    spec = importlib.util.spec_from_file_location("native_build", _BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Build for each set of flags that this CPU can run. Without a compiler nothing is built, and the tests say why."""
    build = _load_build()
    for flags in FLAGS if "--full" in sys.argv else IN_EACH_RUN:
        if unsupported_reason(flags) is None:
            os.environ.update(variables(flags))
            build.library_path.cache_clear()
            try:
                build.library_path()
            except build.Unavailable as error:
                print(f"native engine: not built: {error}", file=sys.stderr)
                return


if __name__ == "__main__":
    main()
