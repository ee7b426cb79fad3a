# shellcheck shell=bash
# Environment of a node before Ray starts on it; every script here sources it. Adapt it to your site.
# Ray's workers inherit the environment of `ray start` on their node; scripts/launch_ray_cluster.sh also passes on, to
# one job, what is exported here where it is called.

export PYTHONUNBUFFERED=1 # logs as they are written

# A model cache that all nodes share, and no network on compute nodes:
# export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1

# The interface between nodes, if NCCL and Gloo choose the wrong one (`ip -brief address` lists them):
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

# A key for trainer.logger=[console,wandb]:
# export WANDB_API_KEY=...

# vLLM's sleep mode, which frees the GPU for the update, does not work with expandable segments.
case "${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_ALLOC_CONF:-}" in
*expandable_segments:True*)
    echo "error: PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, with which vLLM cannot sleep: unset it." >&2
    exit 1
    ;;
esac
