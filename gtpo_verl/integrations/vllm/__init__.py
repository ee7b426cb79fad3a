"""Exact per-token policy entropies out of vLLM rollouts.

An entropy is computed where vLLM computes the log-prob and the rank of a sampled token, travels in the unused upper
half of the rank (``codec``), and reaches verl's TransferQueue as the column ``rollout_entropies`` beside the tokens:

    worker: patch, kernels  →  front end: server, codec  →  client  →  agent_loop  →  TransferQueue

``wiring.enable_rollout_entropy`` turns it on. This module imports nothing.
"""

ENTROPIES = "rollout_entropies"  # column of TransferQueue: (response_len,) float32, nats
VERSIONS = "rollout_versions"  # column of TransferQueue: (response_len,) int32, the step of the sampling weights
WORKER_EXTENSION = "gtpo_verl.integrations.vllm.worker_extension.PolicyWorkerExtension"
OWN_SOCKET = "gtpo_verl_own_socket"  # key in verl's rollout.custom, see weight_socket.py
ENV_FLAG = "GTPO_VERL_ROLLOUT_ENTROPY"  # 1 makes vLLM's processes compute entropies
INSTEAD = "or set algorithm.entropy.source=actor"  # the way out that every refusal ends with
