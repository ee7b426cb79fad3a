#!/usr/bin/env bash
# DAPO, Qwen2.5-7B, 64 GPUs. Published Mean@32 (AIME 2024 / AIME 2025 / MATH-500): 21.2 / 13.33 / 78.85
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_7b algo=dapo verifier=answer "$@"
