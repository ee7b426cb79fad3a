#!/usr/bin/env bash
# Train on a running Ray cluster (scripts/ray_node.sh): submits the job and follows its log.
#   scripts/launch_ray_cluster.sh setting=paper_gtpo_32b backend=megatron algo=gtpo trainer.run_dir=/shared/gtpo-32b ...
# All arguments are Hydra overrides, as for `gtpo-verl train`. RAY_API_SERVER_ADDRESS is the dashboard of the head node.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
for argument in "$@"; do
    case "$argument" in --cfg | --check | --help) exec gtpo-verl train "$@" ;; esac # nothing to submit
done
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- python -m gtpo_verl.train "$@"
