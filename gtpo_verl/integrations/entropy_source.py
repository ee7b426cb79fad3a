"""Where the entropies of credit assignment come from: ``algorithm.entropy.source``. Light to import."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError, choose_from
from gtpo_verl.integrations.vllm import ENTROPIES


@dataclass(frozen=True)
class EntropySource:
    """One source of entropies."""

    name: str
    column: str  # TransferQueue's, that the advantages are computed from
    from_rollout: bool  # vLLM returns entropies beside the tokens
    skips_actor_pass: bool  # the actor's old-log-prob pass is left out (verl's bypass mode)


_SOURCES = (
    EntropySource("actor", "entropy", from_rollout=False, skips_actor_pass=False),
    EntropySource("rollout", ENTROPIES, from_rollout=True, skips_actor_pass=True),
    EntropySource("both", "entropy", from_rollout=True, skips_actor_pass=False),
)
SOURCES = {source.name: source for source in _SOURCES}


def entropy_source(config: DictConfig) -> EntropySource:
    """The source of a run, by default the actor; raises UserError where there is none of this name."""
    name = str(OmegaConf.select(config, "algorithm.entropy.source", default="actor"))
    if name not in SOURCES:
        raise UserError(f"algorithm.entropy.source={name}: no such source{choose_from(name, SOURCES)}")
    return SOURCES[name]
