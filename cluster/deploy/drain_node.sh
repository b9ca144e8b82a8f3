#!/usr/bin/env bash
# drain_node.sh [SECONDS]: before this node ends, moves its replica elsewhere and waits until live streams have ended.
#
# Serve starts a replica on another node, and when that one serves, the replica here drains. Run it as a pod's preStop hook, or by
# hand before `ray stop`. It returns when no replica runs here, at the latest after SECONDS: by default the limits of a start and of
# a drain, 1800 (start_timeout_s) and 60 (drain_timeout_s), and 20. Without a replacement, the replica drains drain_timeout_s and 10
# seconds before SECONDS are over.
set -u
. "$(dirname "$0")/cluster.env"
seconds=${1:-1880}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the node ends" --deadline-remaining-seconds "$seconds" \
    || echo "Ray has not accepted the drain; waiting for the replica all the same" >&2
end=$((SECONDS + seconds))
while [ "$SECONDS" -lt "$end" ] && grep -lqs '^ray::ServeReplica' /proc/[0-9]*/cmdline; do sleep 1; done
