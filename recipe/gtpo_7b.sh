#!/usr/bin/env bash
# GTPO, Qwen2.5-7B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 34.23 / 16.67 / 80.16
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_7b algo=gtpo verifier=answer "$@"
