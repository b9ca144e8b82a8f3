#!/usr/bin/env bash
# start_node.sh OPTIONS: `ray start OPTIONS` with the variables of cluster.env, up to 65,536 open files, and files that no other user
# of this machine can read or replace.
set -eu
. "$(dirname "$0")/cluster.env"
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
umask 077
if [ -O ~/.ray/auth_token ]; then chmod 600 ~/.ray/auth_token; fi
# Ray makes the folders of its sessions writable for everyone, and Serve writes HAProxy's configuration under a known name.
for directory in "$RAY_TMPDIR" "$(dirname "${RAY_SERVE_HAPROXY_CONFIG_FILE_LOC:-/tmp/haproxy-serve/haproxy.cfg}")"; do
    mkdir -p "$directory"
    if [ -L "$directory" ] || [ ! -O "$directory" ] || [ "$(stat -c %a "$directory")" != 700 ]; then
        echo "$directory must be a directory of yours with mode 0700, or other users could replace Ray's files. Change its mode, or" \
            "set RAY_TMPDIR or RAY_SERVE_HAPROXY_CONFIG_FILE_LOC to a path in another directory." >&2
        exit 2
    fi
done
cd "$LLAMA_HOME"
# A node without this option would take the directory of the head.
exec ray start --temp-dir="$RAY_TMPDIR/ray" "$@"
