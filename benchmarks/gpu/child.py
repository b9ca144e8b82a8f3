"""One section in a process of its own: `python -m benchmarks.gpu.child SECTION STATE [settings]`.

`python -m benchmarks.gpu.child describe STATE` stores the name of the device and the versions.
"""

import argparse
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import NAMES, SECTIONS
from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import versions


def describe(settings: Settings) -> dict[str, Any]:
    """The device. Raises Unavailable without one."""
    import torch

    from benchmarks.gpu.clock import clock_of

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")
    found = versions(("torch", "triton", "numpy", "transformers", "vllm"))
    return {"device": clock_of(settings.device).name, "cuda": torch.version.cuda, "versions": found}


def need_gpus(count: int, settings: Settings) -> None:
    """Raises Unavailable where torch sees fewer. On a CPU, processes stand for them."""
    import torch

    if settings.device == "cuda" and (found := torch.cuda.device_count()) < count:
        raise Unavailable(f"it needs {count} GPUs, torch sees {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=(*NAMES, "describe"))
    parser.add_argument("state", type=Path)
    add_settings(parser)
    options = parser.parse_args()
    record, settings, reason = Recorder(options.state), settings_of(options), ""
    try:
        if options.section == "describe":
            record.put("device", describe(settings))
        else:
            need_gpus(next(section.min_gpus for section in SECTIONS if section.name == options.section), settings)
            # A section says what it has left out.
            reason = importlib.import_module(f"benchmarks.gpu.sections.{options.section}").run(record, settings) or ""
    except Unavailable as lacking:
        record.end("unavailable", str(lacking))
    except Exception as error:  # of a device, a library or this program: the other sections run all the same
        traceback.print_exc()
        record.end("failed", f"{type(error).__name__}: {error}"[:500])
        sys.exit(1)
    else:
        record.end("done", reason)


if __name__ == "__main__":
    main()
