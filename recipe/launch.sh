#!/usr/bin/env bash
# recipe/launch.sh one_node|ray_cluster KEY=VALUE...: the launcher in scripts/ beside this directory, where you can adapt
# its environment.sh, or else the one that gtpo_verl was installed with.
set -euo pipefail
command -v gtpo-verl >/dev/null || {
    echo "error: gtpo-verl is not on PATH: install it, or activate its environment first." >&2
    exit 1
}
root="$(dirname "${BASH_SOURCE[0]}")/.."
[ -f "$root/scripts/launch_$1.sh" ] || root="$(gtpo-verl recipes path)"
exec bash "$root/scripts/launch_$1.sh" "${@:2}"
