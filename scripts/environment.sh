# shellcheck shell=bash
# Environment of a node before Ray starts on it; every script here sources it. Adapt it to your site.
# Ray's workers inherit the environment of `ray start` on their node; scripts/launch_ray_cluster.sh also passes on, to
# one job, what is exported here where it is called.

export PYTHONUNBUFFERED=1 # logs as they are written

# A model cache that all nodes share, and no network on compute nodes:
# export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1

# Nodes, and whoever submits a job, show a token to each other. Without a mode, Ray asks for one where it finds one in
# the home directory, and sends none. `scripts/ray_node.sh head` makes the token, ~/.ray/auth_token: where nodes do not
# share a home directory, copy the file, or export its content as RAY_AUTH_TOKEN (containers: docs/guides/cluster-environment.md). RAY_AUTH_MODE=disabled, on all nodes,
# is for a network that nobody else reaches.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"

# Seconds that `ray job stop` leaves a run for its step and a checkpoint before it kills it; Ray's own are 3.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-1800}"

# The interface between nodes, if NCCL and Gloo choose the wrong one (`ip -brief address` lists them):
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

# A key for trainer.logger=[console,wandb]:
# export WANDB_API_KEY=...

# vLLM's sleep mode, which frees the GPU for the update, does not work with expandable segments.
case "${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_ALLOC_CONF:-}" in
*expandable_segments:True*)
    echo "error: PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, with which vLLM cannot sleep: unset it." >&2
    return 1 # to whoever sources this: a login shell stays open, and the scripts end
    ;;
esac

# Sets `hardware` to the override of a launcher. These are runs on GPUs, also where --check looks at one on a machine
# with the CPU stack, which would choose hardware=cpu; hardware=cpu among the words leaves it empty.
with_gpus() { # WORDS
    command -v gtpo-verl >/dev/null || {
        echo "error: gtpo-verl is not on PATH: activate its environment first." >&2
        exit 1
    }
    case " $* " in
    *" hardware="*) hardware=() ;;
    *) hardware=(hardware=gpu) ;;
    esac
}
