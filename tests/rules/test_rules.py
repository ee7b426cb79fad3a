"""Bad input gets one line that says what to do, before verl, Ray or vLLM start."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from checkpoint_writer import write_fsdp
from hydra.core.override_parser.overrides_parser import OverridesParser
from model_files import write_model
from omegaconf import DictConfig, OmegaConf
from tokenizers.normalizers import Lowercase

from gtpo_verl.config import GROUPS, compose_config, prepare
from gtpo_verl.errors import ProblemsError, UserError
from gtpo_verl.integrations import checks
from gtpo_verl.problems import errors_of, evaluate, refuse
from gtpo_verl.rules import model as model_rules
from gtpo_verl.rules import overrides, stages, start
from gtpo_verl.tasks.model import build_model, build_tokenizer

OURS = "reward.custom_reward_function.path=pkg://gtpo_verl.verifiers.reward"
REWARD = """
def good(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": 1.0, "pred": "two"}
def number(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
def text(data_source, solution_str, ground_truth, extra_info=None):
    return "right"
def not_finite(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float("nan"), "acc": 1.0}
def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
def odd_verdict(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": [1.0]}
async def slow_but_good(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": 1.0}
def knows_sums(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": {"sums": 1.0}[data_source]}
def no_verdict(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0}
def no_result(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": -1.0, "acc": 0.0, "verifier_failure": "error"}
def crashes(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / 0
def leaves(data_source, solution_str, ground_truth, extra_info=None):
    import sys
    sys.exit(7)
def hangs(data_source, solution_str, ground_truth, extra_info=None):
    import time
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Overrides for a run that has nothing wrong with it."""
    directory = tmp_path_factory.mktemp("inputs")
    model = write_model(directory / "model")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "1+1"}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
    ] * 64
    for name in ("train", "val"):
        pd.DataFrame(rows).to_parquet(directory / f"{name}.parquet")
    pd.DataFrame([row | {"guide_responses": ["1+1=2"]} for row in rows]).to_parquet(directory / "traces.parquet")
    pd.DataFrame(rows).drop(columns="reward_model").to_parquet(directory / "no_reward_model.parquet")
    pd.DataFrame(rows[:3]).to_parquet(directory / "small.parquet")
    pd.DataFrame([row | {"prompt": "1+1"} for row in rows]).to_parquet(directory / "text_prompt.parquet")
    pd.DataFrame([row | {"reward_model": {"style": "rule"}} for row in rows]).to_parquet(directory / "no_truth.parquet")
    for name, column, row, value in (
        ("null_prompt", "prompt", 40, None),
        ("empty_prompt", "prompt", 63, []),
        ("null_source", "data_source", 1, None),
    ):
        changed = [dict(each) for each in rows]
        changed[row][column] = value
        pd.DataFrame(changed).to_parquet(directory / f"{name}.parquet")
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in changed))
    pd.DataFrame([row | {"data_source": ["sums"]} for row in rows]).to_parquet(directory / "list_source.parquet")
    pd.DataFrame([row | {"extra_info": "text"} for row in rows]).to_parquet(directory / "text_info.parquet")
    table = pq.read_table(directory / "train.parquet")
    pq.write_table(table.append_column("prompt", table["prompt"]), directory / "twice.parquet")
    (directory / "not.parquet").write_text("text")
    sound = (directory / "small.parquet").read_bytes()
    (directory / "damaged.parquet").write_bytes(sound[:40] + b"\xff" * 100 + sound[140:])  # in a page of the prompts
    (directory / "not.jsonl").write_text('{"prompt":')
    (directory / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (directory / "train.json").write_text(json.dumps(rows))
    (directory / "small.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:3]))
    lacking = {name: value for name, value in rows[0].items() if name != "reward_model"}
    (directory / "lacking.jsonl").write_text(json.dumps(lacking) + "\n")
    (directory / "traces.jsonl").write_text(
        "".join(json.dumps(row | {"guide_responses": ["1+1=2"]}) + "\n" for row in rows)
    )
    (directory / "reward.py").write_text(REWARD)
    return {
        "directory": str(directory),
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": str(directory / "train.parquet"),
        "data.val_files": str(directory / "val.parquet"),
        "reward.custom_reward_function.path": str(directory / "reward.py"),
        "reward.custom_reward_function.name": "good",
        "trainer.n_gpus_per_node": "1",
    }


Composer = Callable[..., DictConfig]


@cache
def _chosen(groups: tuple[str, ...]) -> DictConfig:
    """The configuration of these groups: composing takes half a second, and test_config.py tests it."""
    return compose_config(groups)


@pytest.fixture
def composed(inputs: dict[str, str]) -> Composer:
    """A function that composes the sound run with some keys changed; DIR stands for the inputs' directory."""

    def compose(*changes: str) -> DictConfig:
        changed = dict(inputs)
        directory = changed.pop("directory")
        for change in changes:
            key, value = change.replace("DIR", directory).split("=", 1)
            changed[key] = value
        overrides = [f"{key}={value}" for key, value in changed.items() if value != "MISSING"]
        config = copy.deepcopy(_chosen(tuple(item for item in overrides if item.partition("=")[0] in GROUPS)))
        for item in OverridesParser.create().parse_overrides(overrides):
            if item.key_or_group not in GROUPS:
                OmegaConf.update(config, item.key_or_group, item.value(), force_add=True)
        prepare(config, overrides)
        return config

    return compose


def test_a_sound_run_passes(composed: Composer) -> None:
    stages.check(composed())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("actor_rollout_ref.model.path=MISSING", "no model: set actor_rollout_ref.model.path"),
        ("actor_rollout_ref.model.path=/no/such/model", "no such directory"),
        ("actor_rollout_ref.model.path=DIR", "no config.json"),
        ("data.train_files=MISSING", "no data: set data.train_files"),
        ("data.val_files=", "no data: set data.val_files"),
        ("data.val_files=[]", "no data: set data.val_files"),
        ("actor_rollout_ref.model.path=", "no model: set actor_rollout_ref.model.path"),
        ("data.val_files=DIR/absent.parquet", "no such file"),
        ("data.train_files=DIR/no_reward_model.parquet", "lacks the column reward_model"),
        ("data.train_files=DIR/not.parquet", "is not a parquet file"),
        ("data.train_files=DIR/reward.py", "verl reads files whose names end with .parquet, .json or .jsonl"),
        ("data.train_files=DIR/not.jsonl", "not.jsonl is not a JSON file"),
        ("data.val_files=DIR/lacking.jsonl", "lacks the column reward_model; it has data_source, prompt"),
        ("data.train_files=DIR/text_prompt.parquet", "prompt must be a list of messages"),
        ("data.val_files=DIR/no_truth.parquet", "reward_model must be a dict with ground_truth"),
        ("data.train_files=DIR/list_source.parquet", "data_source must be text, the name of its source; it is list"),
        ("data.train_files=DIR/text_info.parquet", "extra_info must be a dict, in which verl looks for index; it is "),
        ("data.train_files=DIR/twice.parquet", "lacks the column prompt; it has data_source, prompt, reward_model, pr"),
        ("data.val_files=DIR/damaged.parquet", "damaged.parquet is not a parquet file, or it is damaged"),
        ("data.train_files=DIR/small.parquet", "has 3 prompts, fewer than data.train_batch_size=64"),
        ("data.train_files=[DIR/small.parquet,DIR/small.jsonl]", "has 6 prompts, fewer than data.train_batch_size=64"),
        ("data.train_max_samples=null", "data.train_max_samples=null: it must be a whole number, -1 for all"),
        ("data.val_max_samples=null", "data.val_max_samples=null: it must be a whole number, -1 for all"),
        ("data.seed=abc", "data.seed=abc: it must be a whole number from 0"),
        ("trainer.total_epochs=0", "trainer.total_epochs=0: it must be from 1 to"),
        ("trainer.logger=null", "trainer.logger=null: it must be a list of loggers"),
        ("data.prompt_key=null", "data.prompt_key=null: it must name a column"),
        ("data.train_max_samples=3", "data.train_max_samples=3 is below data.train_batch_size=64"),
        ("data.train_batch_size=30", "not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5", "does not divide by"),
        ("trainer.n_gpus_per_node=3", "does not divide over 3 data-parallel ranks"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "one rollout engine takes 2 GPUs"),
        ("actor_rollout_ref.rollout.n=1", "at least two responses"),
        ("actor_rollout_ref.rollout.max_model_len=100", "is shorter than data.max_prompt_length"),
        ("reward.reward_kwargs.max_resp_len=4096", "the full penalty would never be reached"),
        ("reward.reward_kwargs.max_resp_len=1024", "verl's DAPO reward would go beyond the full penalty"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=4096", "must be a whole number from 1 to data.max_resp"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len=4.5", "len=4.5 must be a whole number from 1"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "takes one advantage a response"),
        ("actor_rollout_ref.actor.loss_scale_factor=-5", "loss_scale_factor=-5: it must be a finite number above 0"),
        ("actor_rollout_ref.actor.entropy_coeff=nan", "entropy_coeff=nan: it must be a finite number"),
        ("actor_rollout_ref.actor.policy_loss.ppo_kl_coef=-1", "ppo_kl_coef=-1: it must be a finite"),
        ("actor_rollout_ref.actor.optim.clip_grad=-1", "clip_grad=-1: it must be above 0; 1e9 clips nothing"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", "lr_scheduler_type=wsd: choose constant or cosine"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[weights]", "it must be a list of model, optimizer, extra"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=null", "load_contents=null: it must be a list of model"),
        ("reward.num_workers=0", "reward.num_workers=0: it must be from 1 to"),
        (f"{OURS} algorithm.correct_threshold=5", "no response would be right. Set it above 0 and at most 1"),
        (f"{OURS} algorithm.correct_threshold=0", "every response would be right. Set it above 0"),
        ("+algorithm.gtpo.max_length=100", "there is no setting 'max_length'"),
        ("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0", "penalty_factor=0: it must be above 0"),
        ("reward.reward_manager.name=naive", "applies no overlong penalty: set it to dapo"),
        ("reward.reward_model.enable=true", "without a reward function gives scores and no verdict"),
        ("reward.reward_model.enable=true", "set reward.reward_model.enable_resource_pool=true"),
        ("critic.enable=true", "verl would train a critic that nothing reads. Set it to false"),
        ("algorithm.adv_estimator=gae", "gae needs a critic. Set it to true"),
        ("trainer.v1.trainer_mode=async", "choose sync, colocate_async or separate_async"),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true", "verl takes one for both. Remove the override"),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            "loss_scale_factor, for instance to data.max",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=grpo_s", "gives every token its own: set"),
        ("data.max_response_length=0", "must be from 1 to"),
        ("algorithm.gtpo.negatives=inverted", "negatives"),
        ("algorithm.gtpo.clip_kappa=20", "clip_kappa"),
        ("algorithm.filter_groups.on_budget=cry", "train_smaller or stop"),
        ("algorithm.filter_groups.max_num_gen_batches=-1", "it must be a whole number, at least 0"),
        ("algorithm.filter_groups.max_inflight_gen_batches=0", "it must be a whole number, at least 1"),
        ("algorithm.filter_groups.carry_over.max_age=-1", "it must be a whole number, at least 0"),
        ("seed=-1", "seed=-1: it must be a whole number from 0 to 2147483647."),
        ("seed=true", "seed=True: it must be a whole number from 0"),
        ("seed=1.5", "seed=1.5: it must be a whole number from 0"),
        ("algorithm.filter_groups.carry_over.max_age=0.5", "it must be a whole number, at least 0"),
        ("skip.rollout_tq.enable=true", "set algorithm.filter_groups.enable=false"),
        ("algorithm.entropy.source=vllm", "Choose one of: actor, rollout, both"),
        ("algorithm.rollout_correction.bypass_mode=true", "set algorithm.entropy.source=rollout"),
        ("actor_rollout_ref.rollout.name=sglang", "algorithm.entropy.source=actor"),
        ("actor_rollout_ref.rollout.top_p=0.9", "top_p=1"),
        ("actor_rollout_ref.rollout.top_k=50", "top_k=-1"),
        ("algorithm.entropy.check_every=-1", "it must be a number of steps"),
        ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "processed_logprobs"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=grpo_s", "seq-mean-token-mean"),
        ("actor_rollout_ref.actor.clip_ratio_c=null", "must be above 1 with"),
        ("algo=aspo actor_rollout_ref.actor.clip_ratio_c=null", "policy_loss.loss_mode=aspo: set it to"),
        ("algo=ce_gppo actor_rollout_ref.actor.clip_ratio_low=null", "clip_ratio_low must be from 0 to 1 with"),
        ("algo=dcpo_clip actor_rollout_ref.actor.clip_ratio_low=1.5", "clip_ratio_low must be from 0 to 1 with"),
        ("algo=aspo actor_rollout_ref.actor.clip_ratio_high=null", "clip_ratio_high must be a number with"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(composed: Composer, change: str, message: str) -> None:
    others = {
        "algorithm.gtpo.clip_kappa": ["algorithm.gtpo.alpha1=0.9"],
        "reward.reward_model.enable": ["reward.custom_reward_function.path=null"],
    }
    with pytest.raises(UserError) as caught:
        stages.check(composed(*change.split(), *others.get(change.partition("=")[0], [])))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_json_is_data_as_it_is_to_verl(composed: Composer, name: str) -> None:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = composed(
        f"data.train_files=DIR/{name}", f"data.val_files=DIR/{name}", "+data.filter_overlong_prompts=false"
    )
    stages.check(config)
    checks.check_with_verl(config)
    assert len(RLHFDataset(config.data.train_files, tokenizer=None, config=config.data)) == 64


def test_a_file_of_the_hubs_cache_is_known_by_its_link(
    composed: Composer, inputs: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(Path(inputs["data.train_files"]).read_bytes())
    (tmp_path / "train.parquet").symlink_to(tmp_path / "blob")
    stages.check(composed(f"data.train_files={tmp_path}/train.parquet"))


def test_the_verifier_and_the_guides_responses_are_tried_on_json_too(composed: Composer) -> None:
    name = "reward.custom_reward_function.name=crashes"
    with pytest.raises(
        UserError, match=r"on the first prompt of data_source='sums' in data\.train_files=.*train\.jsonl"
    ):
        checks.check_with_verl(composed("data.train_files=DIR/train.jsonl", name))
    stages.check(composed("algo=luffy", "data.train_files=DIR/traces.jsonl"))
    with pytest.raises(UserError, match="has no column guide_responses"):
        stages.check(composed("algo=luffy", "data.train_files=DIR/train.jsonl"))


def test_data_of_the_users_own_class_are_left_to_it(composed: Composer, capsys: pytest.CaptureFixture[str]) -> None:
    own = (
        "data.custom_cls.path=DIR/reward.py",
        "data.custom_cls.name=Mine",
        "data.train_files=DIR/text_prompt.parquet",
    )
    config = composed(*own, "data.val_files=prompts.csv")
    stages.check(config)
    said = capsys.readouterr().out
    assert said.count("note: data.custom_cls.path=") == 1
    assert "your class reads the data" in said
    checks.check_with_verl(config)


IGNORED = [  # a setting that changes training with the first algorithms and nothing with the second ones
    ("algorithm.use_kl_in_reward=true", ("dapo", "grpo"), ("gtpo", "grpo_s")),
    ("algorithm.norm_adv_by_std_in_grpo=false", ("dapo", "grpo"), ("gtpo", "grpo_s")),
    ("algorithm.use_pf_ppo=true", (), ("dapo", "gtpo", "grpo_s")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "read", "ignored"), IGNORED, ids=[case[0] for case in IGNORED])
def test_a_setting_of_verls_that_the_estimator_ignores_is_refused(
    composed: Composer, change: str, read: tuple[str, ...], ignored: tuple[str, ...]
) -> None:
    of_reference = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"  # a KL term needs it
    for name in read:
        stages.check(composed(change, of_reference, f"algo={name}"))
    for name in ignored:
        with pytest.raises(UserError) as caught:
            stages.check(composed(change, of_reference, f"algo={name}"))
        assert str(caught.value).startswith(f"{change} has no effect with algorithm.adv_estimator=")
        assert "\n" not in str(caught.value)


SERVED = "algorithm.guide.source=server;algorithm.guide.model=DIR/model;algorithm.entropy.source=actor"
GUIDED = ("algo=luffy", "data.train_files=DIR/traces.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "algo=gspo",
            "policy_loss.loss_mode=gspo, which has no rule for the guide's rows: choose one of vanilla, mixed, grpo_s",
        ),
        ("algo=rl_zvp", "algorithm.adv_estimator=rl_zvp, which has no rule for the guide's rows"),
        ("algo=empg", "algorithm.adv_estimator=empg, which has no rule for the guide's rows"),
        (
            "algo=qae;algorithm.guide.adv_scope=on_only",
            "adv_scope=on_only does not go with algorithm.adv_estimator=qae",
        ),
        ("algo=gtpo;algorithm.guide.adv_scope=on_only", "set it to union"),
        ("algorithm.guide.in_entropy_stats=true", "adv_estimator=grpo, which compares no tokens: set it to false"),
        ("algo=ar;algorithm.guide.in_entropy_stats=true", "adv_estimator=ar, which reads old log-probs"),
        ("data.train_files=DIR/train.parquet", "has no column guide_responses"),
        ("algo=dapo_mixed", "has no column guide_log_probs"),
        ("algorithm.guide.source=http", "algorithm.guide: source must be one of traces, server"),
        ("algorithm.guide.source=server", "algorithm.guide: source=server needs model=DIRECTORY"),
        ("algorithm.guide.model=a/b", "algorithm.guide: model is read with source=server alone"),
        (
            "algorithm.guide.source=server;algorithm.guide.model=/no/guide",
            "algorithm.guide.model=/no/guide: no such dir",
        ),
        (
            "algorithm.guide.source=server;algorithm.guide.model=DIR/model;algorithm.guide.replicas=0",
            "replicas must be a whole number, at least 1",
        ),
        (
            SERVED + ";actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.name=sglang (the guide runs in vLLM): set actor_rollout_ref.rollout.name=vllm",
        ),
        (
            SERVED + ";actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
            "set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
        ),
        ("algorithm.guide.n_of=2", "algorithm.guide: there is no setting 'n_of'; did you mean n_off"),
        ("algorithm.guide.n_off=8", "may give 8 of the actor_rollout_ref.rollout.n=8 responses of a group"),
        ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode=colocate_async"),
        ("reward.reward_model.enable=true", "does not go with reward.reward_model.enable=True"),
        ("+distillation.enabled=true", "set distillation.enabled=false"),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=true", "no rollout has routed the guide's tokens"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B", "agent_loop_manager_class=null"),
        ("algorithm.entropy.source=rollout", "no rollout has measured the guide's rows"),
    ],
)
def test_a_guide_that_cannot_be_is_refused_in_one_line(composed: Composer, change: str, message: str) -> None:
    guide = ("algorithm.guide.mode=mix", "algorithm.guide.ratio=one", "algorithm.guide.clip=none")
    changes = change.lstrip("+").split(";")
    config = composed(*GUIDED, *(guide if changes[0] != "algo=dapo_mixed" else guide[:1]), *changes)
    with pytest.raises(UserError) as caught:
        stages.check(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["top_p=0.9", "top_k=50", "calculate_log_probs=false"])
def test_a_ratio_to_the_guide_needs_whole_distributions(composed: Composer, change: str) -> None:
    changes = (f"actor_rollout_ref.rollout.{change}", "algorithm.entropy.source=actor")
    with pytest.raises(
        UserError, match=rf"ratio=phi .* set actor_rollout_ref\.rollout\.{change.partition('=')[0]}=.*=one"
    ):
        stages.check(composed("algo=dapo_mixed", "data.train_files=DIR/traces.parquet", *changes))
    stages.check(composed(*GUIDED, *changes))


def test_a_guide_that_can_be_passes(composed: Composer) -> None:
    stages.check(composed(*GUIDED))
    guide = ("algorithm.guide.mode=mix", "algorithm.guide.ratio=one", "algorithm.guide.clip=none")
    for algo in ("dapo", "gtpo", "grpo_s", "fork20", "w_reinforce", "dr_grpo"):
        stages.check(composed(*GUIDED, *guide, f"algo={algo}"))
    stages.check(composed(*GUIDED, *guide, "algo=gtpo", "algorithm.guide.in_entropy_stats=true"))
    stages.check(composed("algo=dapo_mixed", "algorithm.guide.mode=off"))
    on_only = "algorithm.guide.adv_scope=on_only"
    stages.check(composed(*GUIDED, on_only))
    for more in ([], [on_only]):
        with pytest.raises(UserError, match=r"use_kl_in_reward=True \(its KL term would be of the denominators"):
            stages.check(composed(*GUIDED, *more, "algorithm.use_kl_in_reward=true"))


def test_the_guides_responses_are_read_with_the_models_tokenizer(composed: Composer, tmp_path: Path) -> None:
    model = f"actor_rollout_ref.model.path={write_model(tmp_path)}"
    build_tokenizer().save_pretrained(tmp_path)
    checks.check_with_verl(composed(*GUIDED, model))
    with pytest.raises(UserError, match=r"row 0: a response of the guide has 6 tokens, .*max_response_length is 5"):
        checks.check_with_verl(composed(*GUIDED, model, "data.max_response_length=5"))


@pytest.fixture
def byte_tokenizers(tmp_path: Path) -> list[Any]:
    """Two of the embedded tasks, the policy's and the guide's, each in a directory with a model."""
    found = []
    for name in ("policy", "guide"):
        found.append(build_tokenizer())
        found[-1].save_pretrained(write_model(tmp_path / name))
    return found


def test_a_guide_with_another_vocabulary_is_refused(
    composed: Composer, tmp_path: Path, byte_tokenizers: list[Any]
) -> None:
    """It would be asked in token ids that mean something else to it."""
    model = f"actor_rollout_ref.model.path={tmp_path / 'policy'}"
    guide = ("algorithm.guide.source=server", f"algorithm.guide.model={tmp_path / 'guide'}")
    config = composed("algo=dapo_mixed", model, *guide)
    stages.check(config)  # the training data needs no column of the guide
    checks.check_with_verl(config)
    byte_tokenizers[1].add_tokens(["<guide>"])
    byte_tokenizers[1].save_pretrained(tmp_path / "guide")
    with pytest.raises(UserError, match=r"guide\.model=.* another tokenizer than the policy: its vocabulary of .*=one"):
        checks.check_with_verl(config)


def other_end(tokenizer: Any) -> None:
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(40)


def other_split(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = Lowercase()


@pytest.mark.parametrize(("change", "what"), [(other_end, "end-of-sequence"), (other_split, "splits text into other")])
def test_a_guide_that_reads_other_tokens_is_refused(
    byte_tokenizers: list[Any], change: Callable[[Any], None], what: str
) -> None:
    ours, theirs = byte_tokenizers
    assert list(checks._guide_tokenizer("guide", theirs, ours)) == []
    change(theirs)
    (problem,) = checks._guide_tokenizer("guide", theirs, ours)
    assert what in problem.message


OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg.enable"


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_a_soft_penalty_without_its_lengths_is_refused_for_the_algorithm_in_use(composed: Composer, name: str) -> None:
    soft = f"algorithm.{name}.length_penalty=soft"
    with pytest.raises(UserError, match=rf"algorithm\.{name}\.length_penalty=soft takes its lengths from .*=none"):
        stages.check(composed(soft, f"{OVERLONG}=false", f"algo={name}"))
    stages.check(composed(soft, f"{OVERLONG}=false", "algo=dapo"))
    stages.check(composed(f"algorithm.{name}.length_penalty=grop", f"{OVERLONG}=false", f"algo={name}"))


def test_a_preset_whose_penalty_would_be_dropped_is_refused(composed: Composer) -> None:
    stages.check(composed("algo=gtpo_v1_clip"))
    with pytest.raises(UserError, match="length_penalty=soft takes its lengths from"):
        stages.check(composed("algo=gtpo_v1_clip", f"{OVERLONG}=false"))


def test_a_guided_loss_needs_the_clip_range_that_it_reads(composed: Composer) -> None:
    clip = "actor_rollout_ref.actor.clip_ratio_low=1.5"
    stages.check(composed("algo=dapo", clip))  # verl's own loss takes it
    with pytest.raises(UserError, match=r"clip_ratio_low must be from 0 to 1 with .*loss_mode=vanilla"):
        stages.check(composed("algo=dapo", "algorithm.guide.mode=zero", clip))


def test_without_the_penalty_its_lengths_do_not_matter(composed: Composer) -> None:
    stages.check(composed(f"{OVERLONG}=false", "reward.reward_kwargs.max_resp_len=1024", "algo=dapo"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm.filter_groups.enable=false", "set algorithm.filter_groups.enable=true"),
        ("trainer.v1.trainer_mode=colocate_async", "needs trainer.v1.trainer_mode=sync"),
        ("trainer.v1.sampler.custom_sampler.path=DIR/reward.py", "with its own sampler"),
    ],
)
def test_carry_over_is_refused_where_nothing_would_do_it(composed: Composer, change: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        stages.check(composed("algorithm.filter_groups.carry_over.max_age=1", change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["algo=gspo"], "GSPO acts on ratios other than 1"),  # the quickstart makes one update a step
        (["algo=gspo", "actor_rollout_ref.actor.ppo_epochs=2"], ""),
        (["algo=rl_zvp"], ""),
        (["algo=rl_zvp", "algorithm.filter_groups.enable=true"], "dynamic sampling removes them"),
        (["algo=nsr"], "the overlong penalty has no effect on it"),
    ],
)
def test_a_method_without_effect_says_so(changes: list[str], said: str) -> None:
    found = stages.problems(compose_config(["setting=quickstart", "hardware=cpu", *changes]))
    assert errors_of(found) == []
    notes = [problem.message for problem in found]
    about = ("acts on ratios", "dynamic sampling removes", "overlong penalty has no effect")
    assert [said in note for note in notes if any(words in note for words in about)] == [True] * bool(said)


@pytest.mark.parametrize(
    ("override", "unread", "read", "reason"),
    [
        ("guide.n_off=4", "guide.mode=off", "guide.mode=mix", "algorithm.guide.mode=off"),
        ("entropy.check_every=7", "entropy.source=actor", "entropy.source=both", "algorithm.entropy.source=actor"),
        (
            "gtpo.gamma=0.8",
            "gtpo.length_penalty=soft",
            "gtpo.length_penalty=grop",
            "only algorithm.gtpo.length_penalty=grop reads it",
        ),
        (
            "gtpo.length_denominator=max",
            "gtpo.length_penalty=grop",
            "gtpo.length_penalty=soft",
            "only algorithm.gtpo.length_penalty=soft reads it",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_pointed_out(override: str, unread: str, read: str, reason: str) -> None:
    given = f"algorithm.{override}"
    for other, said in ((unread, [f"{given} has no effect: {reason}."]), (read, [])):
        config = compose_config(["algo=gtpo", f"algorithm.{other}", given])
        assert [problem.message for problem in overrides.without_effect(config, [given])] == said


@pytest.mark.parametrize(("mode", "noted"), [("sync", False), ("colocate_async", True)])
def test_a_budget_that_nothing_keeps_is_pointed_out(
    composed: Composer, capsys: pytest.CaptureFixture[str], mode: str, noted: bool
) -> None:
    stages.check(composed(f"trainer.v1.trainer_mode={mode}"))
    assert ("on_budget have no effect" in capsys.readouterr().out) == noted


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        ("algorithm.entropy.source=both", True),
        ("algorithm.entropy.source=rollout", False),
        ("algorithm.rollout_correction.rollout_is=token", False),
    ],
)
def test_carry_over_with_a_ratio_blind_to_age_is_pointed_out(
    composed: Composer, capsys: pytest.CaptureFixture[str], change: str, noted: bool
) -> None:
    stages.check(composed("algorithm.filter_groups.carry_over.max_age=1", change))
    assert ("the clipped ratio does not see their age" in capsys.readouterr().out) == noted


@pytest.mark.parametrize("name", ["good", "number", "slow_but_good"])
def test_verifiers_that_give_a_verdict_pass(composed: Composer, name: str) -> None:
    checks.check_with_verl(composed(f"reward.custom_reward_function.name={name}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reward.custom_reward_function.name=no_verdict", "add `acc`"),
        (
            "reward.custom_reward_function.name=no_result",
            "no verdict on the first prompt of data_source='sums' in data.train_files=",
        ),
        ("reward.custom_reward_function.name=crashes", "ZeroDivisionError"),
        ("reward.custom_reward_function.name=text", "gives 'right' on the first prompt"),
        ("reward.custom_reward_function.name=not_finite", ": it must be a finite number"),
        ("reward.custom_reward_function.name=no_score", "add `score`"),
        ("reward.custom_reward_function.name=odd_verdict", "acc=[1.0] on the first prompt"),
        ("reward.custom_reward_function.name=crashes", "reward.py:"),
        ("reward.custom_reward_function.name=leaves", "fails on the first prompt"),
        ("reward.custom_reward_function.name=leaves", "SystemExit: 7 ("),
        ("reward.custom_reward_function.name=absent", "cannot be loaded: AttributeError"),
        ("reward.custom_reward_function.path=null", "no verifier for the first prompt of data_source='sums'"),
        ("reward.custom_reward_function.path=null", "verifier=boxed (reasoning_gym for its own problems)"),
        ("algorithm.filter_groups.metric=seq_final_reward", "the verifier does not return it on the first prompt of"),
        ("algorithm.filter_groups.metric=pred", "the verifier gives 'two' on the first prompt"),
        ("algorithm.adv_estimator=gtpp", "did you mean gtpo?"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=grpo-s", "did you mean grpo_s?"),
    ],
)
def test_what_only_verl_knows_is_said_in_one_line(composed: Composer, change: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        checks.check_with_verl(composed(change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\nimport nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name' (FILE:2)"),
        ("def compute_score(**columns)\n    return 1.0\n", "SyntaxError: expected ':' (FILE:1)"),
        ("import sys\n\nsys.exit(5)\n", "SystemExit: 5 (FILE:3)"),
    ],
)
def test_a_reward_file_that_cannot_be_imported_is_named_with_its_line(
    composed: Composer, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        checks.check_with_verl(composed(f"reward.custom_reward_function.path={file}"))
    assert str(caught.value) == f"reward.custom_reward_function cannot be loaded: {message.replace('FILE', str(file))}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return directory


def test_a_prompt_that_verl_would_cut_is_refused_where_it_is_to_stop(
    composed: Composer, inputs: dict[str, str], tokenizer: Path
) -> None:
    overrides = ["reward.custom_reward_function.name=good", f"actor_rollout_ref.model.tokenizer_path={tokenizer}"]
    overrides += ["data.max_prompt_length=1", "data.filter_overlong_prompts=false"]
    with pytest.raises(UserError, match=r"train_files=.*: the prompt of row 0 has \d+ tokens, more than .*_length=1"):
        checks.check_with_verl(composed(*overrides))
    checks.check_with_verl(composed(*overrides, "data.truncation=left"))


def test_prompts_that_are_left_out_for_their_length_make_no_batch(
    composed: Composer, tokenizer: Path, tmp_path: Path
) -> None:
    truth = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "2"}}
    short, long = ({"prompt": [{"role": "user", "content": text}], **truth} for text in ("1+1", 40 * "1+" + "1"))
    file = tmp_path / "train.parquet"
    filtered = (
        f"actor_rollout_ref.model.tokenizer_path={tokenizer}",
        *(f"data.train_files={file}", "data.max_prompt_length=30", "data.filter_overlong_prompts=true"),
    )
    pd.DataFrame([long] + 64 * [short]).to_parquet(file)
    checks.check_with_verl(composed(*filtered))
    pd.DataFrame([long] + 63 * [short] + [long]).to_parquet(file)
    with pytest.raises(UserError, match=r"max_prompt_length=30: 63 prompts of data\.train_files are rendered in"):
        checks.check_with_verl(composed(*filtered))


def test_a_chat_template_that_cannot_be_rendered_is_refused(
    composed: Composer, tokenizer: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(tokenizer, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no roles') }}")
    name = "reward.custom_reward_function.name=good"
    with pytest.raises(UserError, match=r"row 0 cannot be rendered with .*broken \(TemplateError: no roles\)"):
        checks.check_with_verl(composed(name, f"actor_rollout_ref.model.tokenizer_path={broken}"))
    own = "actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'"
    checks.check_with_verl(composed(name, f"actor_rollout_ref.model.tokenizer_path={broken}", own))


ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
SEPARATE = (
    *("hardware=cpu", "trainer.v1.trainer_mode=separate_async", "reward.custom_reward_function.name=good"),
    *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
    f"{ENGINE}.custom_backend_module=gloo_engine",  # of tests/support
)


def test_the_engine_that_sends_weights_to_servers_is_asked_for(composed: Composer) -> None:
    checks.check_with_verl(composed(*SEPARATE, f"{ENGINE}.backend=gloo"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"{ENGINE}.backend=nccl"], f"{ENGINE}.backend=nccl: No module named 'cupy'. The extra `gpu` installs"),
        ([f"{ENGINE}.backend=glop"], "did you mean gloo?"),
        ([f"{ENGINE}.backend=naive"], "has servers of its own"),
        ([f"{ENGINE}.custom_backend_module=no.module"], "cannot be imported: No module named 'no'"),
    ],
)
def test_an_engine_that_cannot_send_weights_to_servers_is_refused(
    composed: Composer, changes: list[str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        checks.check_with_verl(composed(*SEPARATE, *changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_of_gpus_is_not_asked_of_the_cpu_stack(
    composed: Composer, capsys: pytest.CaptureFixture[str]
) -> None:
    checks.check_with_verl(composed(*SEPARATE, f"{ENGINE}.backend=nccl", "trainer.device=cuda"))
    assert f"note: {ENGINE}.backend=nccl was not asked: No module named 'cupy'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("actor_rollout_ref.rollout.nnodes=0", "actor_rollout_ref.rollout.nnodes=0"),
        ("trainer.v1.separate_async.parameter_sync_step=3", "it must be 2"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            r"takes 4 GPUs, of which 2 .*change.*rollout\.n_gpus",
        ),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=true", "would lose all updates but the last"),
    ],
)
def test_sizes_that_servers_of_their_own_need(composed: Composer, change: str, message: str) -> None:
    own = (
        "trainer.v1.separate_async.parameter_sync_step=2",  # of a batch of 64 in mini-batches of 32
        *("hardware=gpu", "actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.n_gpus_per_node=2"),
    )
    stages.check(composed(*SEPARATE, *own))
    with pytest.raises(UserError, match=message):
        stages.check(composed(*SEPARATE, *own, change))


def test_megatron_saves_no_checkpoint_in_the_background(composed: Composer) -> None:
    key = "actor_rollout_ref.actor.checkpoint.async_save"
    problems = evaluate(start.RULES, composed("hardware=gpu", "backend=megatron", f"{key}=true"))
    assert [problem.message for problem in problems if problem.message.startswith(f"{key}=true: no checkpoint would")]


def test_engines_on_devices_of_their_own_may_be_larger_than_the_trainer(composed: Composer) -> None:
    own = ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.n_gpus_per_node=4")
    updates = "trainer.v1.separate_async.parameter_sync_step=2"
    stages.check(composed(*SEPARATE, updates, *own, "actor_rollout_ref.rollout.tensor_model_parallel_size=4"))


def test_files_of_other_types_are_no_one_table(composed: Composer, inputs: dict[str, str]) -> None:
    rows = pd.read_parquet(inputs["data.train_files"])
    files = {}
    for name, index in (("numbers", 1), ("texts", "a"), ("others", None)):
        files[name] = Path(inputs["directory"]) / f"{name}.parquet"
        rows.assign(extra_info=[{"index": index, name: 1}] * len(rows)).to_parquet(files[name])
    checks.check_with_verl(composed(f"data.train_files=[{files['numbers']},{files['others']}]"))
    with pytest.raises(UserError, match=r"data\.val_files=.*cannot read them as one table: .* the key index"):
        checks.check_with_verl(composed(f"data.val_files=[{files['numbers']},{files['texts']}]"))


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_the_verifier_is_tried_on_every_data_source_of_every_file(
    composed: Composer, inputs: dict[str, str], key: str
) -> None:
    """The first file and the first row are sound; one source in the middle of the second file is not."""
    sound = pd.read_parquet(inputs["data.train_files"])
    broken = sound.copy()
    broken.loc[40:, "data_source"] = "products"
    file = Path(inputs["directory"]) / "two_sources.parquet"
    broken.to_parquet(file, row_group_size=16)
    files = f"[{inputs['data.train_files']},{file}]"
    name = "reward.custom_reward_function.name=knows_sums"
    checks.check_with_verl(composed(name))
    with pytest.raises(UserError) as caught:
        checks.check_with_verl(composed(name, f"{key}={files}"))
    assert f"the first prompt of data_source='products' in {key}={file}" in str(caught.value)
    assert "KeyError" in str(caught.value)


def test_the_verifier_is_tried_on_a_prompt_without_a_ground_truth(composed: Composer, inputs: dict[str, str]) -> None:
    rows = pd.read_parquet(inputs["data.train_files"])
    rows.at[7, "reward_model"] = {"style": "rule", "ground_truth": None}
    file = Path(inputs["directory"]) / "null_truth.parquet"
    rows.to_parquet(file)
    ours = [*OURS.split(), "reward.custom_reward_function.name=answer"]
    place = r"the first prompt without a ground truth of data_source='sums' in data\.train_files=.*null_truth"
    with pytest.raises(UserError, match=place + r".*: reward_model\.ground_truth must be text or a number"):
        checks.check_with_verl(composed(f"data.train_files={file}", *ours))
    checks.check_with_verl(composed(f"data.train_files={file}"))  # a verifier that needs none


def test_a_verifier_that_hangs_is_not_waited_for(composed: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "VERIFIER_TIMEOUT", 0.2)
    with pytest.raises(UserError, match="no verdict on the first prompt"):
        checks.check_with_verl(composed("reward.custom_reward_function.name=hangs"))


def test_a_hub_that_does_not_answer_is_not_waited_for(composed: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_rules, "HUB_TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: time.sleep(60))
    with pytest.raises(UserError, match="could not be asked"):
        stages.check(composed("actor_rollout_ref.model.path=organisation/name"))


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_problem_and_starts_no_ray(inputs: dict[str, str], tmp_path: Path) -> None:
    """Through the real command: exit code, stderr, and no Ray session of its own."""
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    overrides = [f"{key}={value}" for key, value in inputs.items() if key != "directory"]
    overrides += ["hardware=cpu", "data.train_batch_size=30", "seed=2", "actor_rollout_ref.rollout.n=1"]
    command = [sys.executable, "-m", "gtpo_verl.train", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=tmp_path)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: actor_rollout_ref.rollout.n=1: a group needs at least two")
    assert second.startswith("error: data.train_batch_size=30 is not a multiple")
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.glob("ray*"))


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_named_before_ray_starts(inputs: dict[str, str], tmp_path: Path) -> None:
    """Through the real command, without the variables that hardware=cpu sets: verl takes such a machine for one with
    NVIDIA GPUs.
    """
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "RAY_"))}
    overrides = [f"{key}={value}" for key, value in inputs.items() if key != "directory"]
    overrides += ["hardware=gpu", "+ray_kwargs.ray_init.address=local", f"trainer.run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "gtpo_verl.train", *overrides]
    environment["RAY_TMPDIR"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "error: this machine has no GPU: hardware=cpu trains without one" in done.stderr
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("ray*"))


def pretend_vllm(version: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = directory / f"vllm-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(directory))


def test_an_older_vllm_is_refused_by_name(composed: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray starts, and only where the rollout's entropies are asked for."""
    pretend_vllm("0.20.2", tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"vLLM 0\.20\.2 is installed.*algorithm\.entropy\.source=actor"):
        stages.check(composed())
    stages.check(composed("algorithm.entropy.source=actor"))


def test_a_newer_vllm_is_a_warning_with_what_moved(
    composed: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_vllm("0.40.2", tmp_path, monkeypatch)
    stages.check(composed())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert re.fullmatch(
        r"warning: vllm 0\.40\.2 is newer than what was tested .*: all \d+ symbols of it .* there\.", line
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.resume_mode=automatic"], r"trainer\.resume_mode=automatic: choose auto, disable or resume_path"),
        (["trainer.resume_mode=resume_path"], r"needs trainer\.resume_from_path"),
        (["trainer.n_gpus_per_node=2"], r"was saved by 1 ranks, and this run has 2"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_named(
    composed: Composer, tmp_path: Path, overrides: list[str], message: str
) -> None:
    write_fsdp(tmp_path / "checkpoints", 3)
    with pytest.raises(UserError, match=message):
        stages.check(composed(f"trainer.run_dir={tmp_path}", *overrides))


def test_a_checkpoint_without_what_a_training_goes_on_with_is_named(
    composed: Composer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"
    stages.check(composed(f"trainer.run_dir={tmp_path}", contents))
    assert "save_contents=['hf_model'] lacks model, optimizer, extra: a training that" in capsys.readouterr().out
    write_fsdp(tmp_path / "checkpoints", 3)
    with pytest.raises(UserError, match=r"global_step_3 would be trained on the weights of the base model"):
        stages.check(composed(f"trainer.run_dir={tmp_path}", contents))


def test_the_checkpoint_before_a_broken_one_is_taken_with_a_warning(
    composed: Composer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fsdp(tmp_path / "checkpoints", 3)
    (write_fsdp(tmp_path / "checkpoints", 6) / "data.pt").unlink()
    stages.check(composed(f"trainer.run_dir={tmp_path}"))
    said = capsys.readouterr().out
    assert "warning: " in said
    assert "names global_step_6: data.pt is missing. Resuming from global_step_3; complete: global_step_3." in said
    stages.check(composed(f"trainer.run_dir={tmp_path}", "trainer.resume_mode=disable"))
    assert "warning" not in capsys.readouterr().out


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").write_text('{"model_type":'), r"config\.json is not readable"),
        (lambda model: (model / "config.json").write_text("[]"), r"config\.json is not readable"),
        (lambda model: [file.unlink() for file in model.glob("tokenizer*")], "has no tokenizer"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
        (lambda model: _cut(model / "model.safetensors"), r"model\.safetensors was cut off"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), r"model\.safetensors is no safetensors file"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            r"b\.safetensors is missing",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_is_named(
    composed: Composer, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    model = write_model(tmp_path / "model")
    damage(model)
    with pytest.raises(UserError, match=message):
        stages.check(composed(f"actor_rollout_ref.model.path={model}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("guards.stall_timeout=0", r"guards\.stall_timeout=0: it must be a number above 0"),
        ("guards.phase_timeout=-1", r"guards\.phase_timeout=-1: it must be a number above 0"),
        ("guards.max_failed_share=2", "above 0 and at most 1"),
        ("guards.not_finite=ignore", "choose stop or skip"),
        ("guards.max_skipped_steps=-1", "at least 0"),
        ("guards.bounds.entropy_low.action=end", "choose warn or stop"),
        ("trainer.run_dir=DIR/train.parquet/run", "train.parquet is a file"),
        ("trainer.run_dir=/proc/1/x", r"trainer\.run_dir=/proc/1/x: nothing can be written in /proc/1 "),
        ("trainer.logger=[console,bogus]", "trainer.logger=bogus: verl has no such logger"),
        ("actor_rollout_ref.rollout.dtype=float9", "dtype=float9: choose of auto, half, float16, bfloat16, float, "),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=float9", "model_dtype=float9: choose of fp32, "),
        ("data.train_files=DIR/null_prompt.parquet", r"null_prompt\.parquet: row 40 \(the first is 0\) has no prompt"),
        ("data.val_files=DIR/null_prompt.jsonl", r"null_prompt\.jsonl: row 40 .* has no prompt"),
        ("data.val_files=DIR/empty_prompt.parquet", r"empty_prompt\.parquet: row 63 .* has no prompt"),
        ("data.val_files=DIR/null_source.parquet", r"null_source\.parquet: row 1 .* has no data_source"),
        ("data.train_files=DIR", "is a directory: name its files"),
    ],
)
def test_limits_and_places_that_make_no_sense_are_named(composed: Composer, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stages.check(composed(change))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").write_text("{}"), "cannot read the configuration in"),
        (
            lambda model: (model / "config.json").write_text('{"model_type": "no such"}'),
            "cannot read the configuration",
        ),
        (lambda model: (model / "tokenizer.json").write_text('{"model": 5}'), "cannot read the tokenizer in"),
        (lambda model: (model / "tokenizer.json").write_bytes(b"\xff\xfe"), "cannot read the tokenizer in"),
    ],
)
def test_a_model_that_transformers_cannot_read_is_named_before_ray_starts(
    composed: Composer, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    model = write_model(tmp_path / "model")
    damage(model)
    config = composed(f"actor_rollout_ref.model.path={model}")
    stages.check(config)  # it needs no transformers
    with pytest.raises(UserError, match=message) as caught:
        checks.check_with_verl(config)
    assert "\n" not in str(caught.value)


def test_whatever_is_wrong_is_named_together(composed: Composer) -> None:
    """Problems of the method, of sizes, of the model and of the data, each once."""
    wrong = ("algorithm.gtpo.negatives=inverted", "data.train_batch_size=33", "data.val_files=DIR/absent.parquet")
    config = composed(*wrong, "algorithm.entropy.source=vllm", "actor_rollout_ref.model.path=/no/such/model")
    with pytest.raises(ProblemsError) as caught:
        stages.check(config)
    words = ("negatives", "algorithm.entropy.source=vllm", "is not a multiple", "no such directory", "no such file")
    assert [word in message for word, message in zip(words, caught.value.args, strict=True)] == [True] * len(words)


def test_sizes_that_are_wrong_are_named_together(composed: Composer) -> None:
    wrong = ("data.train_batch_size=33", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.max_model_len=100")
    with pytest.raises(UserError, match=r"^4 settings do not fit: ") as caught:
        stages.check(composed(*wrong, "reward.reward_kwargs.max_resp_len=1024"))
    for number, words in enumerate(("at least two", "not a multiple", "is shorter than", "verl's DAPO reward"), 1):
        assert words in str(caught.value).split(f"({number}) ")[1].split(f" ({number + 1})")[0]
    assert "\n" not in str(caught.value)


SHAPE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("without", "message"), [("eos_token", "no end-of-sequence token"), ("chat_template", "no chat template")]
)
def test_a_tokenizer_that_cannot_write_prompts_or_end_them_is_refused(
    composed: Composer, tmp_path: Path, without: str, message: str
) -> None:
    model = write_model(tmp_path / "model")
    build_model(8, 0, **SHAPE).save_pretrained(model)
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {without: None}))
    with pytest.raises(UserError, match=message) as caught:
        refuse(checks.model(composed(f"actor_rollout_ref.model.path={model}")))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(composed: Composer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(model)
    build_model(200, 0, **SHAPE).save_pretrained(model)
    with pytest.raises(UserError, match="its tokenizer has 258 tokens, and the model 200"):
        refuse(checks.model(composed(f"actor_rollout_ref.model.path={model}")))


def test_a_token_that_was_added_may_have_no_embedding(composed: Composer, tmp_path: Path) -> None:
    """As the one for images in Gemma 3's models of text alone."""
    model = tmp_path / "model"
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), 0, **SHAPE).save_pretrained(model)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(model)
    refuse(checks.model(composed(f"actor_rollout_ref.model.path={model}")))


def test_an_index_of_other_weights_may_lie_beside_those_that_are_loaded(composed: Composer, tmp_path: Path) -> None:
    """`hf download --exclude '*.bin'` leaves it."""
    model = write_model(tmp_path / "model")
    index = {"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00002.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    stages.check(composed(f"actor_rollout_ref.model.path={model}"))
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model-00001-of-00002\.bin is missing"):
        stages.check(composed(f"actor_rollout_ref.model.path={model}"))


def test_weights_of_another_configuration_are_refused_before_ray_starts(composed: Composer, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    build_model(8, 0, **SHAPE).save_pretrained(model)
    refuse(checks.model(composed(f"actor_rollout_ref.model.path={model}")))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"hidden_size": 16}))
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is 8 × 8, by the configuration 8 × 16") as caught:
        refuse(checks.model(composed(f"actor_rollout_ref.model.path={model}")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=5"], "algorithm=5: algorithm is a section"),
        (["trainer.nnodes=null"], r"trainer\.nnodes=null: it must be from 1 to"),
        (["actor_rollout_ref.rollout.n=1.5"], r"actor_rollout_ref\.rollout\.n=1\.5: it must be from 1 to"),
        (["data.max_response_length=null"], r"data\.max_response_length=null: it must be from 1"),
        (["actor_rollout_ref.rollout.max_num_seqs=[1]"], "it must be a single value"),
        (["actor_rollout_ref.rollout.temperature=nan"], "set it above 0: at 0 all responses"),
        (["algorithm.entropy.check_every=null"], r"algorithm\.entropy\.check_every=null: it must be a number of steps"),
        (["algorithm.correct_threshold=inf"], r"algorithm\.correct_threshold=inf: it must be a finite number"),
        (["data.train_batch_size=1" + 50 * "0"], r"data\.train_batch_size=10{39}\.\.\.: it must be"),
        (["actor_rollout_ref.model.path=5"], r"actor_rollout_ref\.model\.path=5: it must be a path"),
        (["trainer.default_local_dir=0.5"], r"trainer\.default_local_dir=0\.5: it must be a path"),
        (["data.val_files=[1]"], r"data\.val_files=\[1\]: it must be a file, or a list of files"),
        (["trainer.project_name=${nope}"], "Interpolation key 'nope' not found"),
        (["data=${seed}"], "data is a section"),
        (["actor_rollout_ref.rollout.val_kwargs=null"], r"actor_rollout_ref\.rollout\.val_kwargs is a section"),
        (["setting=small_gpu", "actor_rollout_ref.rollout.engine_kwargs.vllm=2"], r"engine_kwargs\.vllm\.NAME"),
        (["algorithm.w_reinforce.correct=1" + 400 * "0"], r"correct must be a finite number, got 10{400}"),
        (["algorithm.correct_threshold=1" + 400 * "0"], r"correct_threshold=10{39}\.\.\.: it must be a finite number"),
        (["algorithm.entropy.check_every=1" + 400 * "0"], r"check_every=10{39}\.\.\.: it must be a number of steps"),
        (["actor_rollout_ref.rollout.top_p=null"], r"top_p=null: it must be above 0 and at most 1"),
        (
            ["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=null"],
            r"ulysses_sequence_parallel_size=null: it must be from 1",
        ),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=0.5"], r"fsdp_size=0\.5: it must be -1"),
        (
            ["~actor_rollout_ref.actor.fsdp_config"],
            r"strategy=fsdp2 needs the section .*\.actor\.fsdp_config",
        ),
        (
            ["actor_rollout_ref.actor.strategy=megatron"],
            r"strategy=megatron needs the section .*\.actor\.megatron",
        ),
        (["actor_rollout_ref.actor.strategy=fsdp3"], r"strategy=fsdp3: choose fsdp, fsdp2 or megatron"),
        (["actor_rollout_ref.actor.optim.lr=null"], r"optim\.lr=null: it must be a finite number"),
        (["trainer.v1.sampler.max_off_policy_threshold=0"], r"max_off_policy_threshold=0: it must be from 1"),
        (["trainer.v1.sampler.max_off_policy_strategy=dropp"], r"max_off_policy_strategy=dropp: choose drop or wait"),
        (
            ["hardware=cpu", "actor_rollout_ref.actor.strategy=fsdp"],
            r"strategy=fsdp needs GPUs: with hardware=cpu choose backend=fsdp",
        ),
        (
            [
                *("hardware=cpu", "trainer.n_gpus_per_node=2"),
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            ],
            r"ulysses_sequence_parallel_size=2 needs GPUs",
        ),
        (
            ["setting=small_gpu", "actor_rollout_ref.rollout.max_num_batched_tokens=128"],
            r"max_num_batched_tokens=128 is below max_num_seqs=\d+, which vLLM refuses",
        ),
    ],
    ids=lambda value: value[0][:60] if isinstance(value, list) else "",
)
def test_a_value_of_another_kind_is_one_line(overrides: list[str], message: str) -> None:
    def compose_and_check() -> None:
        config = compose_config(overrides)
        prepare(config, overrides)
        refuse(stages.problems(config))

    with pytest.raises(UserError, match=message) as caught:
        compose_and_check()
    assert "\n" not in str(caught.value)
