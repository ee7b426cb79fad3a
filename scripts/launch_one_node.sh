#!/usr/bin/env bash
# Train on this machine: scripts/launch_one_node.sh setting=small_gpu algo=gtpo data.train_files=... data.val_files=...
# Everything behind the name is a Hydra override, as for `gtpo-verl train`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec gtpo-verl train trainer.nnodes=1 "$@"
