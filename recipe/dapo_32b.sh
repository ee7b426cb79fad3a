#!/usr/bin/env bash
# DAPO, Qwen2.5-32B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 34.06 / 21.67 / 84.45
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_32b algo=dapo verifier=answer "$@"
