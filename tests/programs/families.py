"""Every family's model on every backend and number of ranks, against transformers: `python -m tests.programs.families`.

--interpreter adds the fused backend with its kernels in Triton's interpreter, on one rank (minutes for each family).
--families, --ranks and --backends choose some. Exit status 1 if tokens differ, or logits by 1e-4.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch

from llama_core.backends.parallel import alone
from tests.conftest import RankPool
from tests.support import families
from tests.support.forking import interpreted_environment, prepare_interpreter


def report(name: str, where: str, results: list[families.Expected], expected: families.Expected) -> bool:
    """Print a line for one family. Returns whether all ranks' results are near transformers'."""
    try:
        worst = max(families.difference(got, expected) for got in results)
    except AssertionError:
        print(f"{name:18} {where:22} OTHER TOKENS", flush=True)
        return False
    print(f"{name:18} {where:22} {worst:.1e}", flush=True)
    return worst < 1e-4


def interpret(root: Path, name: str) -> bool:
    """The family's model in this process, whose Triton interprets kernels."""
    from llama_core.backends.fused.device import StepDevice
    from llama_core.backends.fused.kernels import TritonOps

    expected = families.write(root / name, name)
    with patch(
        "llama_core.backends.rank_loading.choose_ops",
        lambda kind, device, **options: (TritonOps(**options), StepDevice(device)),
    ):
        got = families.run(alone("cpu"), str(root / name), "fused")
    return report(name, "fused, interpreter", [got], expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", nargs="+", default=list(families.FAMILIES), choices=list(families.FAMILIES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--backends", nargs="+", default=["native", "torch"])
    parser.add_argument("--interpreter", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if os.environ.get("TRITON_INTERPRET") == "1":
            prepare_interpreter()
            agree = [interpret(root, name) for name in options.families]
            sys.exit(not all(agree))
        models = {name: families.write(root / name, name) for name in options.families}
        agree = []
        for world_size in options.ranks:
            pool = RankPool(world_size, root / f"ranks{world_size}")
            for backend in options.backends:
                for name, expected in models.items():
                    results = pool.call(families.run, str(root / name), backend)
                    agree.append(report(name, f"{backend}, {world_size} ranks", results, expected))
            pool.close()
    if options.interpreter:
        command = [sys.executable, "-m", "tests.programs.families", "--families", *options.families]
        agree.append(subprocess.run(command, env=interpreted_environment()).returncode == 0)
    sys.exit(not all(agree))


if __name__ == "__main__":
    main()
