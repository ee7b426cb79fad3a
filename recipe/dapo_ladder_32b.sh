#!/usr/bin/env bash
# A row of DAPO's Table 1, Qwen2.5-32B, 128 GPUs: recipe/dapo_ladder_32b.sh 4_soft_overlong ...
# Published avg@32 on AIME 2024 by row:
# 1_naive_grpo 30, 2_overlong_filtering 36, 3_clip_higher 38, 4_soft_overlong 41, 5_token_level_loss 42, 6_dapo 50
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_dapo_32b algo="ladder/${1:?the row, such as 6_dapo}" verifier=answer "${@:2}"
