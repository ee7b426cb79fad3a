#!/usr/bin/env bash
# DAPO as in its own paper, Qwen2.5-32B, 128 GPUs, 20480 tokens. Published avg@32 on AIME 2024: 50
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_dapo_32b algo=dapo verifier=answer "$@"
