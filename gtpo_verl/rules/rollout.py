"""Rules of entropies and where they come from, and of the backend."""

from collections.abc import Iterable, Iterator

from omegaconf import DictConfig

from gtpo_verl.integrations import contract
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.vllm.requirements import rollout_faults
from gtpo_verl.planning.parallel import parallelism
from gtpo_verl.problems import Problem, warning
from gtpo_verl.versions import check_vllm, installed_version


def backend(config: DictConfig) -> Iterator[Problem]:
    """On a CPU verl has FSDP2 alone, with whole sequences."""
    if config.trainer.device != "cpu":
        return
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy != "fsdp2":
        yield Problem(f"actor_rollout_ref.actor.strategy={strategy} needs GPUs: with hardware=cpu choose backend=fsdp.")
    elif (size := parallelism(config).sequence) > 1:
        yield Problem(f"ulysses_sequence_parallel_size={size} needs GPUs: set it to 1 with hardware=cpu.")


def entropies(config: DictConfig) -> Iterator[Problem]:
    """The source of entropies exists, and what comes from the rollout will be exact."""
    source = entropy_source(config)
    if config.algorithm.rollout_correction.bypass_mode and not source.skips_actor_pass:
        yield Problem(
            "algorithm.rollout_correction.bypass_mode=true skips the pass that computes the actor's entropies, and "
            f"algorithm.entropy.source={source.name} needs them: set algorithm.entropy.source=rollout, or "
            "bypass_mode=false."
        )
    if source.from_rollout:
        yield from map(Problem, rollout_faults(config.actor_rollout_ref.rollout))


def vllm_version(config: DictConfig) -> Iterable[Problem]:
    """The rollout's entropies were made for the vLLM that is installed here, if any: every server checks again."""
    installed = installed_version("vllm")
    if entropy_source(config).from_rollout and installed is not None:
        check_vllm(installed)
    return ()


def newer_versions(config: DictConfig) -> Iterator[Problem]:
    """verl and vLLM are none that is newer than what was tested; if one is, the symbols that moved."""
    yield from map(warning, contract.warnings())


RULES = (backend, entropies)
MACHINE = (vllm_version, newer_versions)
