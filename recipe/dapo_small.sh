#!/usr/bin/env bash
# DAPO, Qwen2.5-1.5B, one node of 8 GPUs: one arm of an ablation, two hours by `gtpo-verl plan`. No published result
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" one_node setting=small_gpu algo=dapo verifier=answer "$@"
