"""`python -m llama_core.backends.native`: build the engine now instead of at the first start."""

import sys

from llama_core.backends.native.build import Unavailable, library_path

try:
    print(f"native engine: {library_path()}")
except Unavailable as error:
    print(f"native engine: not available, torch computes instead: {error}", file=sys.stderr)
