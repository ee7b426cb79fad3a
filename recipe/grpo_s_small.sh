#!/usr/bin/env bash
# GRPO-S, Qwen2.5-1.5B, one node of 8 GPUs: an arm of an ablation of a day. Nothing is published for it
exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/launch_one_node.sh" setting=small_gpu algo=grpo_s verifier=answer "$@"
