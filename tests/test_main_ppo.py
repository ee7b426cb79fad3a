"""verl's command with our methods: what is composed, what is refused, and what the plugin leaves alone elsewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from gtpo_verl.config import compose_config, verl_config_dir
from gtpo_verl.errors import UserError
from gtpo_verl.main_ppo import arguments, prepare

SNAPSHOT = Path(__file__).parent / "support" / "verl_snapshot.py"


def composed(*given: str, name: str = "ppo_trainer") -> DictConfig:
    """verl's configuration with the user's arguments, as ``python -m gtpo_verl.main_ppo`` hands them to Hydra."""
    with hydra.initialize_config_dir(str(verl_config_dir()), version_base=None):
        return hydra.compose(name, arguments(given))


def test_settings_of_ours_need_no_plus_and_a_relative_path_is_verls() -> None:
    assert arguments(["algorithm.adv_estimator=gtpo", "algorithm.gtpo.alpha2=0.2", "algorithm.gamma=1"]) == [
        "algorithm.adv_estimator=gtpo",
        "++algorithm.gtpo.alpha2=0.2",
        "algorithm.gamma=1",
    ]
    config = str(verl_config_dir())
    assert arguments(["--config-path=config"]) == [f"--config-path={config}"]
    assert arguments(["-cp", "config", "x=1"]) == ["-cp", config, "x=1"]
    assert arguments(["--cfg", "job", "-p", "algorithm.gtpo"]) == ["--cfg", "job", "-p", "algorithm.gtpo"]
    assert arguments(["--config-path=/mine", "--config-path=pkg://mine"]) == [
        "--config-path=/mine",
        "--config-path=pkg://mine",
    ]


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_with_an_estimator_of_verls_nothing_is_changed(name: str) -> None:
    given = ("algorithm.adv_estimator=grpo", "data.train_batch_size=8")
    config = composed(*given, name=name)
    with hydra.initialize_config_dir(str(verl_config_dir()), version_base=None):
        assert hydra.compose(name, list(given)) == config
    before = OmegaConf.to_yaml(config)
    prepare(config)
    assert OmegaConf.to_yaml(config) == before


def test_with_ours_its_settings_are_added_and_nothing_else() -> None:
    config = composed("algorithm.adv_estimator=gtpo", "algorithm.gtpo.alpha2=0.2")
    stock = composed("algorithm.adv_estimator=gtpo")
    prepare(config)
    assert config.algorithm.gtpo.alpha2 == 0.2
    assert config.algorithm.gtpo.entropy_floor == 1e-3  # as in algo=gtpo
    assert config.algorithm.entropy == {"source": "actor", "check_every": 20}
    assert config.algorithm.correct_threshold == 1.0
    with open_dict(config):
        for key in ("gtpo", "entropy", "correct_threshold"):
            del config.algorithm[key]
    assert config == stock


def test_entropies_of_the_rollout_skip_the_actors_pass() -> None:
    config = composed(
        "algorithm.adv_estimator=gtpo", "algorithm.entropy.source=rollout", "actor_rollout_ref.rollout.name=vllm"
    )
    prepare(config)
    assert config.algorithm.rollout_correction.bypass_mode


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.use_v1=false", "is verl's legacy trainer, which cannot run algorithm.adv_estimator=gtpo"),
        ("algorithm.gtpo.alpah2=0.2", "did you mean alpha2?"),
        ("reward.reward_model.enable=true", "gives scores and no verdict"),
        ("algorithm.entropy.source=rolout", "did you mean rollout?"),
        ("algorithm.rollout_correction.bypass_mode=true", "skips the pass that computes the actor's entropies"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=grpo_s", "averages over sequences"),
        ("+algorithm.guide.mode=both", "algorithm.guide.mode=both: only `gtpo-verl train` gives rows"),
        ("algorithm.gtpo.max_length=30000", "there is no setting 'max_length'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(given: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(composed("algorithm.adv_estimator=gtpo", given))


PENALTY = [
    f"+reward.reward_kwargs.overlong_buffer_cfg.{item}" for item in ("enable=true", "len=64", "penalty_factor=1")
]
LIMIT, LENGTHS = "data.max_response_length=512", "+reward.reward_kwargs.max_resp_len=512"
MANAGER = "reward.reward_manager.name=dapo"


def test_the_penalty_for_length_is_the_same_for_every_estimator_or_refused() -> None:
    """verl's own estimators get it from the reward manager alone, ours from its settings too."""
    method = "algorithm.adv_estimator=fork20"
    prepare(composed(method, *PENALTY, LIMIT, LENGTHS, MANAGER))
    with pytest.raises(UserError, match=r"reward_manager\.name=naive applies no overlong penalty"):
        prepare(composed(method, *PENALTY, LIMIT, LENGTHS))
    for others in ([], [LENGTHS]):
        with pytest.raises(UserError, match=r"differs from data\.max_response_length=2048"):
            prepare(composed(method, *PENALTY, "data.max_response_length=2048", MANAGER, *others))


def test_advantages_of_grpo_s_in_another_loss_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(composed("algorithm.adv_estimator=grpo_s"))
    assert (
        "note: GRPO-S is published with actor_rollout_ref.actor.policy_loss.loss_mode=grpo_s" in capsys.readouterr().out
    )
    prepare(composed("algorithm.adv_estimator=gtpo"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "kl_cov",
            r"kl_cov is .*loss_agg_mode=token-mean .*loss_mode=kl_cov .*adv_estimator=grpo; the rest of DAPO ",
        ),
        ("ce_gppo", r" \+actor_rollout_ref.actor.policy_loss.beta1=0.75 .* actor_rollout_ref.*loss_mode=ce_gppo "),
        ("gptpo", "no such estimator; did you mean gtpo?"),
        ("GTPO", "no such estimator; did you mean gtpo?"),
        ("grpo-s", "no such estimator; did you mean grpo_s?"),
    ],
)
def test_a_name_that_is_no_estimator_is_refused_before_anything_starts(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(composed(f"algorithm.adv_estimator={name}"))
    prepare(composed("algorithm.adv_estimator=grpo_v2"))  # the user's own: verl looks it up when it needs it


def test_a_refused_name_is_told_with_all_settings_in_which_it_differs_from_its_estimator() -> None:
    """gtpo_v6 has the published entropy floor, and `algo=gtpo` a higher one, which it would get without being told."""
    for name in ("gtpo_v1", "gtpo_v1_clip", "gtpo_v2", "gtpo_v6", "grpo_s_v1", "gtpo_shuffled_both", "random60"):
        with pytest.raises(UserError) as refused:
            prepare(composed(f"algorithm.adv_estimator={name}"))
        keys = re.search(rf"algo={name} is (.*); the rest of DAPO", str(refused.value)).group(1).split()
        config = composed(*keys, *PENALTY, LIMIT, LENGTHS, MANAGER)
        prepare(config)
        preset = compose_config([f"algo={name}"]).algorithm
        assert config.algorithm[preset.adv_estimator] == preset[preset.adv_estimator], name


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("algo=gtpo", "here it is algorithm.adv_estimator=gtpo"),
        ("algorithm.correct_treshold=0.9", "did you mean algorithm.correct_threshold?"),
        ("+algorithm.correct_treshold=0.9", "did you mean algorithm.correct_threshold?"),
        ("+algorithm.gtp.alpha2=0.2", "did you mean algorithm.gtpo?"),
        ("algorithm.grpo-s.alpha2=0.2", "did you mean algorithm.grpo_s?"),
        ("++algorithm.entropyy.source=rollout", "did you mean algorithm.entropy?"),
    ],
)
def test_what_a_newcomer_writes_is_answered_with_the_key(argument: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        arguments(["algorithm.adv_estimator=gtpo", argument])


@pytest.mark.slow
def test_importing_verl_does_not_bring_what_only_a_guided_loss_needs() -> None:
    script = "import sys, verl; print('gtpo_verl.integrations.losses' in sys.modules, 'datasets' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "True False"


@pytest.mark.slow
def test_its_help_says_what_it_adds_to_verls() -> None:
    command = [sys.executable, "-m", "gtpo_verl.main_ppo", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "algorithm.correct_threshold" in printed
    assert "Configuration groups" in printed  # Hydra's


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ended"), [("gtpo", True), pytest.param("grpo", False, marks=pytest.mark.exhaustive)])
def test_verls_own_main_with_our_estimator_ends_with_the_line_to_use(name: str, ended: bool) -> None:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"algorithm.adv_estimator={name}", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == (2 if ended else 0)
    assert ("gtpo_verl.main_ppo" in done.stderr) is ended


def snapshot(**environment: str) -> dict[str, Any]:
    """What a process that imports verl and what its trainer needs looks like."""
    done = subprocess.run(
        [sys.executable, str(SNAPSHOT)],
        env={name: value for name, value in os.environ.items() if not name.startswith("GTPO_VERL")} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_process_that_does_not_name_us_differs_in_names_in_verls_registries_alone() -> None:
    without, with_plugin = snapshot(VERL_USE_EXTERNAL_PLUGINS="none"), snapshot()
    for one in (without, with_plugin):
        del one["environment"]["VERL_USE_EXTERNAL_PLUGINS"]
    for registry, names in without.pop("registries").items():
        assert set(names) < set(with_plugin["registries"][registry])
    del with_plugin["registries"]
    assert with_plugin == without


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_is_compared_sees_a_change() -> None:
    without, of_a_run = snapshot(), snapshot(GTPO_VERL_RUN="1", GTPO_VERL_SEED="1")
    changed = {name for name in without if of_a_run[name] != without[name]}
    assert changed == {"environment", "attributes", "filters", "random"}


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_there_is_a_length_penalty_where_verls_overlong_buffer_is_on_and_nowhere_else(name: str) -> None:
    """The lengths are the run's: a method's own are those of another setting."""
    given = (f"algorithm.adv_estimator={name}", f"algorithm.{name}.length_penalty=soft")
    config = composed(given[0])
    prepare(config)
    assert config.algorithm[name].length_penalty == "none"
    with pytest.raises(UserError, match="length_penalty=soft takes its lengths from reward"):
        prepare(composed(*given))
    config = composed(given[0], *PENALTY, LIMIT, LENGTHS, MANAGER)
    prepare(config)
    assert config.algorithm[name].length_penalty == "soft"
