#!/usr/bin/env bash
# start_node.sh OPTIONS: `ray start OPTIONS` with the variables of cluster.env and up to 65,536 open files.
set -eu
. "$(dirname "$0")/cluster.env"
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
cd "$LLAMA_HOME"
exec ray start "$@"
