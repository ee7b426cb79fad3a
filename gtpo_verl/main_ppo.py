"""``python -m gtpo_verl.main_ppo``: verl's ``python -m verl.trainer.main_ppo`` with the methods of this package.

The arguments, the configuration and its defaults are verl's. With an estimator of verl's, verl's own main runs; with
one of this package's (``algorithm.adv_estimator=gtpo``), verl's trainer with credit assignment and nothing else.
Settings of ours need no ``+``: ``algorithm.<method>.*``, ``algorithm.entropy.*`` and ``algorithm.correct_threshold``;
``gtpo-verl train algo=gtpo --cfg job`` shows those of a method under ``algorithm``.
"""

import sys
from collections.abc import Sequence

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from gtpo_verl.config import choices, compose_config, option_keys, verl_config_dir
from gtpo_verl.errors import UserError, did_you_mean, main_guard
from gtpo_verl.problems import evaluate, refuse
from gtpo_verl.rules.ranges import ACTOR, OVERLONG

CONFIG_PATH = ("--config-path", "-cp")  # Hydra's
THRESHOLD = "algorithm.correct_threshold"


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of the command as Hydra gets them: settings of ours are added to verl's configuration, which has no
    such keys; a relative ``--config-path`` is from verl's main, as in verl's own scripts.
    """
    from gtpo_verl.algorithms import algorithms

    ours = {THRESHOLD, *(f"algorithm.{name}" for name in ("entropy", *algorithms()))}
    changed = []
    for argument, before in zip(given, ("", *given), strict=False):
        flag, equals, value = argument.partition("=")
        key = ".".join(flag.lstrip("+").split(".")[:2])  # algorithm.<method>
        if before in CONFIG_PATH:
            argument = _from_verl(argument)
        elif flag in CONFIG_PATH and value:
            argument = f"{flag}={_from_verl(value)}"
        elif key in ours:  # without = it is the section behind --package
            argument = f"++{argument.lstrip('+')}" if equals else argument
        elif flag == "algo":
            raise UserError(f"{argument} is for gtpo-verl train: here it is algorithm.adv_estimator={value}.")
        elif hint := did_you_mean(key.lower().replace("-", "_"), ours, cutoff=0.94):
            raise UserError(f"{flag}: there is no such key{hint}")
        changed.append(argument)
    return changed


def _from_verl(path: str) -> str:
    return path if "://" in path else str(verl_config_dir().parent / path)  # an absolute path stays what it is


def prepare(config: DictConfig) -> None:
    """Fill in the settings of a method of ours that the user has not given, those of ``gtpo-verl train algo=NAME`` with
    the entropies of the actor, and raise UserError for all that does not go together.
    """
    from gtpo_verl.algorithms import algorithm_of
    from gtpo_verl.integrations.context import overlong
    from gtpo_verl.integrations.entropy_source import entropy_source
    from gtpo_verl.rules import algorithm, rollout, sizes

    if OmegaConf.select(config, "algorithm.guide.mode", default="off") != "off":
        raise UserError(
            f"algorithm.guide.mode={config.algorithm.guide.mode}: only `gtpo-verl train` gives rows of a group to a "
            "guide. Train with it, or leave algorithm.guide out."
        )
    method = algorithm_of(config)
    if method is None:
        _check_estimator(config)
    if method is None or method.verl_estimator is not None:
        return
    if not config.trainer.use_v1:
        raise UserError(
            f"trainer.use_v1=false is verl's legacy trainer, which cannot run algorithm.adv_estimator="
            f"{method.estimator}: leave it out."
        )
    defaults = _defaults(method.name)
    settings = {
        "correct_threshold": defaults.correct_threshold,
        "entropy": {"source": "actor", "check_every": defaults.entropy.check_every},
        method.name: defaults.get(method.name) or {},
    }
    own = settings[method.name]
    if own.get("length_penalty") == "soft" and overlong(config) is None:  # verl's default has no such penalty
        own["length_penalty"] = "none"
    with open_dict(config):
        config.algorithm = OmegaConf.merge(settings, config.algorithm)
    if config.algorithm[method.name].get("length_penalty") == "soft" and overlong(config) is None:
        raise UserError(
            f"algorithm.{method.name}.length_penalty=soft takes its lengths from {OVERLONG}, which is off: add "
            f"++{OVERLONG}.enable=true with its len and penalty_factor, ++reward.reward_kwargs.max_resp_len, and "
            "reward.reward_manager.name=dapo, or leave it out."
        )
    if entropy_source(config).skips_actor_pass:
        config.algorithm.rollout_correction.bypass_mode = True  # verl's name for "old log-probs are the rollout's"
    of_method = (algorithm.method_settings, algorithm.loss, algorithm.ignored, algorithm.verdicts)
    of_length = (algorithm.overlong_penalty, sizes.lengths)
    refuse(evaluate((*of_method, *of_length, algorithm.without_effect, rollout.entropies), config))


def _defaults(estimator: str) -> DictConfig:
    """The section ``algorithm`` whose values an estimator gets where the user gives none."""
    return compose_config([f"algo={estimator}"] if estimator in choices("algo") else []).algorithm


def _check_estimator(config: DictConfig) -> None:
    """Raise UserError for an option of ``algo`` that is no estimator, and for a misspelt one, which verl would look up
    after its first generation. Other names may be the user's own.
    """
    from gtpo_verl.integrations.plugin import known_estimators

    name = str(config.algorithm.adv_estimator)
    if name in known_estimators():
        return
    if name in choices("algo"):
        preset, loss = compose_config([f"algo={name}"]), f"{ACTOR}.policy_loss."
        estimator = preset.algorithm.adv_estimator
        settings, filled_in = (each.get(estimator) or {} for each in (preset.algorithm, _defaults(estimator)))
        unlike = {f"algorithm.{estimator}.{key}" for key, value in settings.items() if value != filled_in.get(key)}
        told = []
        for key in sorted(option_keys("algo", name) | unlike):
            added = key.startswith(loss) and key.removeprefix(loss) not in config.actor_rollout_ref.actor.policy_loss
            told.append(f"{'+' * added}{key}={OmegaConf.select(preset, key)}")
        raise UserError(
            f"algorithm.adv_estimator={name}: no such estimator. algo={name} is {' '.join(told)}; the rest of DAPO "
            "(clip-higher, dynamic sampling, length penalty) has keys of its own, see docs/guides/your-verl-command.md"
        )
    if hint := did_you_mean(name.lower().replace("-", "_"), known_estimators(), cutoff=0.85):
        raise UserError(f"algorithm.adv_estimator={name}: no such estimator{hint}")


def _train(config: DictConfig) -> None:
    from gtpo_verl.integrations.drop_in import run

    def train() -> int:
        prepare(config)
        run(config)
        return 0

    code = main_guard(train)
    if code:
        sys.exit(code)


def main() -> int:
    """Compose as verl's main does, and train; returns the exit code."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(str(__doc__).replace("``", "`"))  # Hydra's help, which follows, knows verl's settings
    sys.argv = [sys.argv[0], *arguments(sys.argv[1:])]
    hydra.main(config_path=str(verl_config_dir()), config_name="ppo_trainer", version_base=None)(_train)()
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
