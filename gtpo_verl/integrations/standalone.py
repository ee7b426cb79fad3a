"""Configurations of vLLM servers that hold a model of their own, instead of weights that a trainer sends."""

import copy

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms.mixed_policy import GuideConfig, guide_config
from gtpo_verl.config import set_value
from gtpo_verl.integrations.weights import fit_to_model

ROLLOUT = "actor_rollout_ref.rollout"


def standalone(config: DictConfig) -> None:
    """Turn a training's configuration into that of standalone servers, which load the model themselves; in place."""
    settings = {
        "actor_rollout_ref.hybrid_engine": False,
        "transfer_queue.enable": True,
        # the nodes that would train serve instead, with as many replicas as fit on them
        f"{ROLLOUT}.nnodes": config.trainer.nnodes,
        f"{ROLLOUT}.n_gpus_per_node": config.trainer.n_gpus_per_node,
        f"{ROLLOUT}.load_format": "auto",  # in a training verl sends the weights
        f"{ROLLOUT}.calculate_log_probs": False,
    }
    for key, value in settings.items():
        set_value(config, key, value)
    fit_to_model(config)  # verl's servers calculate with it, though nothing is sent


def guide_of(config: DictConfig) -> GuideConfig:
    """The guide of a run; raises a UserError for an unknown key or an impossible value."""
    return guide_config(OmegaConf.select(config, "algorithm.guide") or {})


def guide_servers(config: DictConfig) -> DictConfig | None:
    """The configuration of the guide's servers, None where a run has none.

    All that is not said here is the policy's: length limits, temperature, memory, sizes of a batch.
    """
    guide = guide_of(config)
    if not guide.served:
        return None
    served = copy.deepcopy(config)
    standalone(served)
    policy = config.actor_rollout_ref
    sizes = ("data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
    settings = {
        **{f"{ROLLOUT}.{name}": 1 for name in sizes},
        f"{ROLLOUT}.nnodes": guide.replicas,  # each replica is on one node
        f"{ROLLOUT}.n_gpus_per_node": guide.tensor_parallel_size,
        f"{ROLLOUT}.tensor_model_parallel_size": guide.tensor_parallel_size,
        f"{ROLLOUT}.calculate_log_probs": policy.rollout.calculate_log_probs,
        f"{ROLLOUT}.top_p": 1.0,  # its log-probs are of the whole distribution
        f"{ROLLOUT}.top_k": -1,
    }
    for key, value in settings.items():
        set_value(served, key, value)
    # not the policy's section with another path: adapters, tokenizer and overrides in it are of another model
    served.actor_rollout_ref.model = OmegaConf.create(
        {
            "_target_": "verl.workers.config.HFModelConfig",
            "path": guide.model,
            "trust_remote_code": policy.model.get("trust_remote_code", False),
            "external_lib": policy.model.get("external_lib"),
        }
    )
    return served
