#!/usr/bin/env bash
# GRPO-S, Qwen2.5-32B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 35.52 / 25.11 / 85.79
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_32b algo=grpo_s verifier=answer "$@"
