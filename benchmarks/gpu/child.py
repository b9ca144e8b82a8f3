"""One section in a process of its own: `python -m benchmarks.gpu.child SECTION FILE [settings]`.

The section `device` stores the name of the device and the versions.
"""

import argparse
import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import versions


def describe(settings: Settings) -> dict[str, Any]:
    """Raises Unavailable without the device."""
    import torch

    from benchmarks.gpu.clock import clock_of

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")
    found = versions(("torch", "triton", "numpy"))
    return {"name": clock_of(settings.device).name, "cuda": torch.version.cuda, "versions": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section")
    parser.add_argument("file", type=Path)
    add_settings(parser)
    options = parser.parse_args()
    record, settings, reason = Recorder(options.file, options.section), settings_of(options), ""
    try:
        if options.section == "device":
            record.put("device", describe(settings))
        else:
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
