#!/usr/bin/env bash
# Add this machine to a Ray cluster; run it on every node, in the same environment or container.
#   scripts/ray_node.sh head
#   scripts/ray_node.sh worker HEAD_ADDRESS
# A worker stays in the foreground until the cluster stops. `ray stop` on a node removes it.
#
# Nodes and clients share Ray's token: ~/.ray/auth_token of the head, or what RAY_AUTH_TOKEN_PATH names. The dashboard,
# which takes jobs, listens on the head's loopback; DASHBOARD_HOST=0.0.0.0 opens it to the network, with the token only.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

token() { # [--generate]
    [ "$RAY_AUTH_MODE" != token ] || ray get-auth-token "$@" >/dev/null 2>&1 || {
        echo "error: no token here: copy ~/.ray/auth_token from the head, or export RAY_AUTH_TOKEN (scripts/environment.sh)." >&2
        exit 1
    }
}

case "${1:-} $#" in
"head 1")
    case "${DASHBOARD_HOST:-127.0.0.1} $RAY_AUTH_MODE" in
    127.0.0.1\ * | localhost\ * | *\ token) ;;
    *)
        echo "error: DASHBOARD_HOST=$DASHBOARD_HOST takes jobs from everyone who reaches it: set RAY_AUTH_MODE=token." >&2
        exit 1
        ;;
    esac
    token --generate
    exec ray start --head --port=6379 --dashboard-host="${DASHBOARD_HOST:-127.0.0.1}" --dashboard-port=8265 \
        --disable-usage-stats
    ;;
"worker 2")
    token
    timeout 10 bash -c "</dev/tcp/$2/6379" 2>/dev/null || {
        echo "error: nothing answers at $2:6379: start the head first (scripts/ray_node.sh head), or open the port." >&2
        exit 1
    }
    exec ray start --address="$2:6379" --block --disable-usage-stats
    ;;
*)
    echo "usage: $0 head | worker HEAD_ADDRESS" >&2
    exit 2
    ;;
esac
