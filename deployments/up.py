"""`python -m deployments.up CONFIG`: the earlier name of `llama-ray up`, kept for scripts that use it."""

import sys
from pathlib import Path

from deployments.local.up import serve_file

if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("usage: llama-ray up CONFIG.yaml [-v] [key=value...]", file=sys.stderr)
        sys.exit(2)
    sys.exit(serve_file(Path(sys.argv[1])))
