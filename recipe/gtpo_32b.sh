#!/usr/bin/env bash
# GTPO, Qwen2.5-32B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 35.21 / 26.89 / 85.72
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_32b algo=gtpo verifier=answer "$@"
