#!/usr/bin/env bash
# Three steps of GTPO, Qwen2.5-0.5B, one GPU: checks that everything starts and that the two entropies agree
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" one_node setting=one_gpu algo=gtpo verifier=answer "$@"
