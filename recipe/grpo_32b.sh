#!/usr/bin/env bash
# GRPO, Qwen2.5-32B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 29.17 / 17.71 / 84.16
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_32b algo=ladder/1_naive_grpo verifier=answer "$@"
