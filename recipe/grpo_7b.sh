#!/usr/bin/env bash
# GRPO, Qwen2.5-7B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 28.36 / 15.00 / 78.62
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_7b algo=ladder/1_naive_grpo verifier=answer "$@"
