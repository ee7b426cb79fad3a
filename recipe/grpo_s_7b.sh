#!/usr/bin/env bash
# GRPO-S, Qwen2.5-7B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 34.67 / 18.33 / 80.07
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_7b algo=grpo_s verifier=answer "$@"
