#!/usr/bin/env bash
# Train on this machine: scripts/launch_one_node.sh setting=small_gpu algo=gtpo data.train_files=... data.val_files=...
# All arguments are Hydra overrides, as for `gtpo-verl train`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
with_gpus "$@"
exec gtpo-verl train trainer.nnodes=1 "$@" "${hardware[@]}"
