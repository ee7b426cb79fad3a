#!/usr/bin/env bash
# LUFFY's objective, without dynamic sampling as there, Qwen2.5-7B, 64 GPUs. Needs data with solutions
# (docs/guides/mixed-policy.md). Its published figures are of another model, data and batch.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_7b algo=luffy verifier=answer \
    algorithm.filter_groups.enable=false "$@"
