"""Names that the modules of rollout entropies share: columns, keys, classes. Imports nothing."""

ENTROPIES = "rollout_entropies"  # column of TransferQueue: (response_len,) float32, nats
VERSIONS = (
    "rollout_versions"  # column of TransferQueue: (response_len,) int32, the training step of the sampling weights
)
WORKER_EXTENSION = "gtpo_verl.integrations.vllm.worker_extension.PolicyWorkerExtension"
SOCKET_TOKEN = "gtpo_verl_socket_token"  # key in verl's rollout.custom, see weight_socket.py
ENV_FLAG = "GTPO_VERL_ROLLOUT_ENTROPY"  # 1 makes vLLM's processes compute entropies
INSTEAD = "or set algorithm.entropy.source=actor"  # the way out that every refusal ends with
