#!/usr/bin/env bash
# start_node.sh OPTIONS: `ray start OPTIONS` with the variables of cluster.env and as many open files as are allowed.
set -eu
. "$(dirname "$0")/cluster.env"
# 65,536 open files, or the hard limit where that is lower.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
cd "$LLAMA_HOME"
exec ray start "$@"
