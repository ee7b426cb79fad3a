"""The rules in the order in which they are asked: values alone, then the configuration, then this machine.

What needs verl imported comes after them (`integrations.checks`), and what needs the figures of a plan is `rules.plan`.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from omegaconf import DictConfig

from gtpo_verl.integrations import checks
from gtpo_verl.problems import Problem, Rule, evaluate, refuse
from gtpo_verl.rules import algorithm, data, guide, model, overrides, ranges, rollout, sizes, start
from gtpo_verl.tasks.prepare import use_embedded_prompts

CONFIGURATION = (*algorithm.RULES, *guide.RULES, *rollout.RULES, *sizes.RULES)
MACHINE = (*start.RULES, *model.RULES, *data.RULES, *rollout.MACHINE)


def problems(config: DictConfig, given: Sequence[str] = (), rules: Iterable[Rule] = CONFIGURATION) -> list[Problem]:
    """What is wrong with a configuration, and what is worth knowing; by itself, without model, files and verl.

    Args:
        config: composed and prepared.
        given: the user's overrides, of which those without effect are named.
        rules: asked where every value is in its range, because they calculate with the values.
    """
    outside = evaluate(ranges.RULES, config)
    return outside or evaluate([partial(overrides.without_effect, given=given), *rules], config)


def check(config: DictConfig, given: Sequence[str] = ()) -> None:
    """Check a training before verl is imported, which takes about a second; warnings and notes are printed. Raises
    UserError: everything that is wrong.
    """
    refuse(problems(config, given, (*CONFIGURATION, *MACHINE, partial(start.ray, given=given))))


def check_evaluation(config: DictConfig, given: Sequence[str] = ()) -> None:
    """Check what a command that samples and verifies needs, and make the prompts of an embedded task; raises a
    UserError of everything that is wrong.
    """
    rules = (sizes.lengths, model.model, algorithm.verifier, partial(start.ray, given=given))
    refuse(evaluate([ranges.sampling], config) or evaluate(rules, config))
    refuse(evaluate([checks.model], config))  # what transformers says of it
    use_embedded_prompts(config)  # which takes minutes: what can be checked before is
    refuse(data.data(config, ("val_files",)))
