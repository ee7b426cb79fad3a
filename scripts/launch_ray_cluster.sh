#!/usr/bin/env bash
# Train on a running Ray cluster (scripts/ray_node.sh): submits the job and follows its log.
#   scripts/launch_ray_cluster.sh setting=paper_gtpo_32b backend=megatron algo=gtpo trainer.run_dir=/shared/gtpo-32b \
#       actor_rollout_ref.model.path=/shared/models/Qwen2.5-32B ...
# Arguments are Hydra overrides, as for `gtpo-verl train`, and options of `gtpo-verl submit`: --check asks the cluster.
# RAY_API_SERVER_ADDRESS is the dashboard of the head node.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
source "$here/environment.sh"
with_gpus "$@"
for argument in "$@"; do
    case "$argument" in # nothing to submit
        --cfg | --help) exec gtpo-verl train "$@" "${hardware[@]}" ;;
        --list | --logs | --logs=*) exec gtpo-verl submit "$@" ;;
    esac
done
exec gtpo-verl submit --environment "$here/environment.sh" "$@" "${hardware[@]}"
