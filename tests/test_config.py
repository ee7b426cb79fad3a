"""Composition of a run's configuration from verl's YAML, ours, and overrides."""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from dotted import dotted
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import Algorithm, algorithm, algorithm_of, algorithms
from gtpo_verl.algorithms.config import run_settings
from gtpo_verl.config import (
    IN_RAY_JOB,
    check_path_in_job,
    choices,
    compose_config,
    parse_overrides,
    prepare,
    quoted,
    verl_config_dir,
    with_config_dir,
)
from gtpo_verl.errors import UserError

CONFIGS = Path(str(files("gtpo_verl.configs")))  # where Hydra reads them: a checkout's, or those of a wheel
SETTINGS = choices("setting")


RUNS = [
    *([f"setting={setting}"] for setting in SETTINGS),
    ["setting=paper_dapo_32b", "backend=megatron"],
    ["setting=quickstart", "hardware=cpu"],
]
# A composition takes 0.3 s. Those of the paper's methods are made at every test run; the family's presets are read as
# files by the fast tests, composed once by the slow ones, and in every setting by the exhaustive ones.
PAPER = ("dapo", "gtpo", "grpo_s", "grpo")
FAMILY = tuple(name for name in algorithms() if name not in PAPER)
EACH = [*PAPER, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY)]


@cache
def composed(name: str) -> DictConfig:
    return compose_config([f"algo={name}", "setting=quickstart"])


def preset(name: str) -> dict[str, object]:
    """Dotted keys to values of a preset and those it builds on, without Hydra."""
    document = OmegaConf.to_container(OmegaConf.load(CONFIGS / "algo" / f"{name}.yaml"), resolve=False)
    assert isinstance(document, dict)
    parents = [parent for parent in document.pop("defaults", []) if parent != "_self_"]
    return {key: value for parent in parents for key, value in preset(parent).items()} | dotted(document)


def foreign(keys: Iterable[str], entry: Algorithm) -> set[str]:
    """The keys that this method may not change."""
    own = tuple(key for key in entry.keys if key.endswith("."))
    return {key for key in keys if key not in entry.keys and not key.startswith(own)}


def test_a_preset_sets_estimator_loss_and_aggregation_of_its_entry_and_what_the_entry_names() -> None:
    for name, entry in algorithms().items():
        found = preset(name)
        assert foreign(found, entry) == set(), name
        objective = {
            "algorithm.adv_estimator": entry.estimator,
            "actor_rollout_ref.actor.policy_loss.loss_mode": entry.loss,
            "actor_rollout_ref.actor.loss_agg_mode": entry.aggregation,
        }
        assert found.items() >= objective.items(), name
        in_base = {key for key in entry.changes if ".policy_loss.seq_" in key}  # GRPO-S's are in base.yaml
        for change in set(entry.changes) - in_base:
            assert any(key == change or (change.endswith(".") and key.startswith(change)) for key in found), name


def check_arms(run: list[str], names: Iterable[str]) -> None:
    baseline = dotted(compose_config(["algo=dapo", *run]))
    for name in names:
        other = dotted(compose_config([f"algo={name}", *run]))
        differing = {key for key in baseline.keys() | other.keys() if baseline.get(key) != other.get(key)}
        assert differing, f"{name} is the same as dapo"
        assert foreign(differing, algorithm(name)) == set(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [*RUNS[:3], *(pytest.param(run, marks=pytest.mark.exhaustive) for run in RUNS[3:])], ids=" ".join
)
def test_arms_of_an_ablation_differ_in_the_algorithm_alone(run: list[str]) -> None:
    """Each registry entry names the keys that its method may change; a setting gives every arm the same of all
    others.
    """
    check_arms(run, PAPER[1:])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_arms_of_the_family_differ_in_the_algorithm_alone(run: list[str]) -> None:
    check_arms(run, FAMILY)


@pytest.mark.parametrize("name", EACH)
def test_every_registered_method_has_a_preset_that_the_registry_recognises(name: str) -> None:
    assert algorithm_of(composed(name)) is algorithm(name)


@pytest.mark.slow
def test_a_preset_of_another_version_is_recognised_and_another_estimator_is_not() -> None:
    assert algorithm_of(compose_config(["algo=gtpo_v2"])).name == "gtpo"
    assert algorithm_of(compose_config(["algo=dapo", "algorithm.adv_estimator=rloo"])) is None


@pytest.mark.parametrize("name", EACH)
def test_a_dataclass_is_the_only_place_of_a_default(name: str) -> None:
    """No file in configs/ repeats one, and what is composed is what the dataclass says."""
    base = (CONFIGS / "base.yaml").read_text()
    settings = run_settings(algorithm(name).config)
    assert not [key for key in settings if f"  {key}:" in base]
    found = composed({"gtpo": "gtpo_v6"}.get(name, name)).algorithm.get(name)
    assert dict(found or {}) | {"length_penalty": None} == settings | {"length_penalty": None}


@pytest.mark.parametrize("arm", [name for name in choices("algo") if name not in FAMILY])
@pytest.mark.parametrize("backend", choices("backend"))
@pytest.mark.slow
@pytest.mark.exhaustive  # twenty compositions
def test_every_algorithm_composes_with_every_backend(arm: str, backend: str) -> None:
    config = compose_config([f"algo={arm}", f"backend={backend}"])
    assert config.actor_rollout_ref.actor.strategy == {"fsdp": "fsdp2", "megatron": "megatron"}[backend]


@pytest.mark.slow
def test_a_setting_brings_the_layout_of_its_backend_and_settings_know_no_backend() -> None:
    """Settings are written once for both engines; how a 32B model is split is chosen by setting and backend
    together.
    """
    fsdp = compose_config(["setting=paper_dapo_32b"]).actor_rollout_ref.actor
    assert (fsdp.fsdp_config.ulysses_sequence_parallel_size, fsdp.ppo_max_token_len_per_gpu) == (4, 11264)
    for setting in ("paper_gtpo_32b", "paper_dapo_32b"):
        megatron = compose_config([f"setting={setting}", "backend=megatron"]).actor_rollout_ref.actor.megatron
        assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (8, 1)
    assert compose_config(["backend=megatron"]).actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1
    without = compose_config(["setting=paper_dapo_32b", "~layout"]).actor_rollout_ref.actor
    assert without.fsdp_config.ulysses_sequence_parallel_size == 1
    for name in choices("layout"):
        backend, _, setting = name.partition("_")
        assert backend in choices("backend"), name
        assert setting in SETTINGS, name


@pytest.mark.parametrize("name", EACH)
def test_dapo_is_whole_in_every_arm(name: str) -> None:
    """But for what the entry of a method names."""
    actor = "actor_rollout_ref.actor"
    dapo = {
        f"{actor}.clip_ratio_low": 0.2,
        f"{actor}.clip_ratio_high": 0.28,
        f"{actor}.clip_ratio_c": 10.0,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.use_kl_in_reward": False,
        "reward.reward_manager.name": "dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
    }
    found = {key: OmegaConf.select(composed(name), key) for key in dapo}
    assert {key for key in dapo if found[key] != dapo[key]} == set(algorithm(name).changes) & set(dapo)


OURS = {  # keys that verl's YAML does not have, and who reads them
    "seed": "trainer, evaluate; verl's own seeds take its value",
    "guards": "trainer, reward_loop, sampling",
    "algorithm.correct_threshold": "trainer._verdicts",
    "algorithm.entropy": "trainer, task_runner, rules",
    "algorithm.guide": "agent_loops, trainer, rules",
    "algorithm.filter_groups.on_budget": "sampling",
    "algorithm.filter_groups.carry_over": "sampling",
    "algorithm.overlong_filtering": "trainer",
    **{f"algorithm.{name}": "estimators" for name in algorithms()},
    "actor_rollout_ref.actor.policy_loss.seq_ratio": "losses",
    "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_low": "losses",
    "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high": "losses",
    "actor_rollout_ref.rollout.enable_sleep_mode": "verl.workers.config.RolloutConfig",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": "verl.workers.config.FSDPEngineConfig",
    "actor_rollout_ref.ref.fsdp_config": "verl.workers.config.FSDPEngineConfig",
    "actor_rollout_ref.model.override_config.attn_implementation": "transformers",
    "actor_rollout_ref.rollout.engine_kwargs.vllm": "vllm",
    "reward.reward_kwargs": "verl.experimental.reward_loop.reward_manager.dapo",
    "trainer.seed_requests": "streams",
    "trainer.run_dir": "train, trainer",
    "trainer.allow_changes": "continuation",
    "trainer.credit_dump_freq": "trainer",
    "trainer.v1.sampler.sampler_kwargs.poll_interval": "sampling",
    "ray_kwargs.ray_init.num_gpus": "ray.init",
    "ray_kwargs.ray_init.include_dashboard": "ray.init",
    "ray_kwargs.ray_init.runtime_env.env_vars": "ray.init",
}


@pytest.fixture(scope="module")
def verls_keys() -> set[str]:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(verl_config_dir()), version_base="1.3"):
        return set(dotted(compose("ppo_trainer")))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_key_of_ours_is_unknown_to_verl_and_to_us(setting: str, verls_keys: set[str]) -> None:
    """A misspelt key in a group file composes without a word, so every key must be verl's or in the list above."""
    ours = set(dotted(compose_config([f"setting={setting}", "hardware=cpu"])))
    unknown = {key for key in ours - verls_keys if not any(key == own or key.startswith(f"{own}.") for own in OURS)}
    assert unknown == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algo=gtpp", "did you mean gtpo?"),
        ("algorithm.gtpo.alpa2=1", "did you mean algorithm.gtpo.alpha2?"),
        ("data.train_batchsize=1", "did you mean data.train_batch_size?"),
        ("gtpo.alpha1=1", "did you mean algorithm.gtpo.alpha1?"),
        ("sett=default", "did you mean setting?"),
        ("layout=megatron_paper_dapo_32", "did you mean megatron_paper_dapo_32b?"),
        ("layout=megatron_paper_dapo_32b", "is not for backend=fsdp"),
        ("trainer.nnodes={", "does not parse"),
    ],
)
def test_a_wrong_override_is_answered_with_the_right_one(override: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint) as caught:
        compose_config([override])
    assert "\n" not in str(caught.value)
    assert ("write +" in str(caught.value)) is override.startswith(("data.", "gtpo.", "sett")), (
        "a method's keys are all listed"
    )


@pytest.mark.slow
def test_composing_imports_neither_verl_nor_ray() -> None:
    compose = "from gtpo_verl.config import compose_config; compose_config()"
    code = f"import sys; {compose}; print([m for m in ('verl', 'ray', 'vllm') if m in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/")
    ).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=abc", "data.train_batch_size=abc: it must be a number (without the override it is"),
        ("trainer.nnodes=two", "it must be a number (without the override it is 1)"),
        ("actor_rollout_ref.actor.optim.lr=fast", "it must be a number (without the override it is 1e-06)"),
        ("algorithm.filter_groups.enable=yes", "it must be true or false (without the override it is true)"),
        ("~algo", "a run needs a method"),
        ("~seed", "~seed: keys stay, since something reads them"),
        ("hydra.searchpath=conf", "these overrides do not compose: hydra.searchpath must be a list of strings"),
        ("algo=[dapo,gtpo]", "a run trains one method"),
        ("algo=dapo,gtpo", "`gtpo-verl sweep` trains every value"),
        ("seed=range(3)", "`gtpo-verl sweep` trains every value"),
    ],
)
def test_an_override_that_no_run_can_have_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_config([override])
    assert message in str(caught.value)


def test_words_numbers_and_interpolations_pass_where_they_belong() -> None:
    config = compose_config(
        [
            *(
                "trainer.project_name=mine",
                "data.train_batch_size=24",
                "+trainer.new=word",
                "setting=small_gpu",
                "~layout",
            ),
            "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
            *("actor_rollout_ref.model.path=a/b", "data.val_files=[a.parquet,b.parquet]", "data.seed=null"),
        ]
    )
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 24


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["setting=default"], (8, 8)),
        (["setting=paper_gtpo_32b"], (16, 16)),  # 8 nodes
        (["setting=paper_dapo_32b"], (32, 32)),  # 16 nodes
        (["setting=paper_dapo_32b", "actor_rollout_ref.rollout.agent.num_workers=5"], (5, 32)),
        (
            ["setting=paper_gtpo_7b", "trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=8"],
            (32, 32),
        ),
        (["setting=quickstart", "hardware=cpu"], (1, 1)),
    ],
)
def test_queues_and_agent_loops_grow_with_the_nodes(overrides: list[str], expected: tuple[int, int]) -> None:
    config = compose_config(overrides)
    prepare(config, overrides)
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    assert (config.actor_rollout_ref.rollout.agent.num_workers, units) == expected


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.default_local_dir", "trainer.rollout_data_dir"])
def test_results_do_not_go_to_a_local_directory_named_after_a_bucket(key: str) -> None:
    overrides = [f"{key}=s3://bucket/run"]
    with pytest.raises(UserError, match=rf"^{re.escape(key)}=s3://bucket/run: .* all nodes mount"):
        prepare(compose_config(overrides), overrides)


@pytest.mark.parametrize("path", [None, "runs/gtpo"])
def test_results_of_a_submitted_job_do_not_end_in_rays_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.delenv(IN_RAY_JOB, raising=False)
    check_path_in_job("trainer.run_dir", path)
    monkeypatch.setenv(IN_RAY_JOB, "{}")
    check_path_in_job("trainer.run_dir", "/shared/runs/gtpo")
    with pytest.raises(UserError, match=r"^trainer\.run_dir.*Give an absolute path"):
        check_path_in_job("trainer.run_dir", path)


def test_the_variable_of_a_submitted_job_is_rays() -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert IN_RAY_JOB == RAY_JOB_CONFIG_JSON_ENV_VAR


# -------------------------------------------------------------------- a Hydra application like others


def test_a_users_own_configuration_is_found_by_config_dir_and_by_hydras_search_path(tmp_path: Path) -> None:
    for place, alpha2 in (("a", 0.3), ("b", 0.4)):
        (tmp_path / place / "algo").mkdir(parents=True)
        text = f"# @package _global_\ndefaults: [/algo/gtpo, _self_]\nalgorithm: {{gtpo: {{alpha2: {alpha2}}}}}\n"
        (tmp_path / place / "algo" / f"mine_{place}.yaml").write_text(text)
    (tmp_path / "a" / "layout").mkdir()
    (tmp_path / "a" / "layout" / "fsdp_mine.yaml").write_text("# @package _global_\ntrainer: {nnodes: 3}\n")
    overrides = with_config_dir(["algo=mine_b", f"hydra.searchpath=[file://{tmp_path / 'b'}]"], tmp_path / "a")
    assert compose_config(overrides).algorithm.gtpo.alpha2 == 0.4
    config = compose_config(with_config_dir(["algo=mine_a", "layout=fsdp_mine"], tmp_path / "a"))
    assert (config.algorithm.gtpo.alpha2, config.trainer.nnodes) == (0.3, 3)
    with pytest.raises(UserError, match="no such directory"):
        with_config_dir([], tmp_path / "c")
    (tmp_path / "a" / "setting").mkdir()
    (tmp_path / "a" / "setting" / "mine.yaml").write_text("trainer: {nnodes: 3}\n")
    with pytest.raises(UserError, match="setting=mine: its file sets keys of a section 'setting', which nothing reads"):
        compose_config(with_config_dir(["setting=mine"], tmp_path / "a"))


def test_a_new_key_needs_a_plus_except_where_verl_hands_a_section_on() -> None:
    config = compose_config(
        ["actor_rollout_ref.rollout.engine_kwargs.vllm.new=1", "actor_rollout_ref.model.override_config.a.b=2"]
    )
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.new == 1
    assert config.actor_rollout_ref.model.override_config.a.b == 2


@pytest.mark.parametrize("value", ["a,b=c", "a\\b", "a\\", '\\"q"', "x\ty", "a\nb", "it's ${x}", "ü", ""])
def test_hydra_reads_a_quoted_value_back(value: str) -> None:
    (item,) = parse_overrides([f"key={quoted(value)}"])
    assert item.value() == value


@pytest.mark.slow
def test_a_run_is_named_after_what_it_trains(tmp_path: Path) -> None:
    def names(*overrides: str) -> tuple[str, str]:
        config = compose_config(overrides)
        prepare(config, overrides)
        return Path(config.trainer.run_dir).name, config.trainer.experiment_name

    directory, name = names("algo=gtpo", "algo=dapo", "seed=3")
    assert directory.startswith("dapo-seed3-")
    assert name == directory
    assert names("algo=ladder/6_dapo", f"trainer.run_dir={tmp_path}/x") == ("x", "ladder-6_dapo-seed0-x")
    assert names("trainer.experiment_name=mine", f"trainer.run_dir={tmp_path}/x") == ("x", "mine")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 100),
        (["trainer.total_epochs=2"], None),
        (["trainer.total_epochs=2", "trainer.total_training_steps=7"], 7),
    ],
)
def test_epochs_of_the_users_are_not_cut_off_by_our_number_of_steps(overrides: list[str], steps: int | None) -> None:
    config = compose_config(overrides)
    prepare(config, overrides)
    assert config.trainer.total_training_steps == steps


SEEDS = (
    *("data.seed", "actor_rollout_ref.actor.data_loader_seed", "actor_rollout_ref.rollout.seed"),
    "critic.data_loader_seed",
)


@pytest.mark.slow
def test_one_key_sets_every_seed_and_a_seed_of_verls_can_still_be_set() -> None:
    config = compose_config(["seed=7", "data.seed=3"])
    prepare(config, [])
    assert [OmegaConf.select(config, key) for key in SEEDS] == [3, 7, 7, 7]
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.GTPO_VERL_SEED == "7"
    assert compose_config(["seed=7", "backend=megatron"]).actor_rollout_ref.actor.megatron.seed == 7
