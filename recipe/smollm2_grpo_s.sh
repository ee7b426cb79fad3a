#!/usr/bin/env bash
# GRPO-S, SmolLM2-135M-Instruct on problems of reasoning-gym, one GPU (on a CPU: docs/start/real-model.md). No published result
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" one_node setting=smollm2 algo=grpo_s verifier=reasoning_gym "$@"
