"""Exact per-token policy entropies out of vLLM rollouts.

An entropy is computed where vLLM computes the log-prob and the rank of a sampled token, travels in the unused upper
half of the rank (``codec``), and reaches verl's TransferQueue as the column ``rollout_entropies`` beside the tokens:

    worker: patch, kernels  →  front end: server, codec  →  client  →  agent_loop  →  TransferQueue

``wiring.enable_rollout_entropy`` turns it on. This module imports nothing heavy.
"""
