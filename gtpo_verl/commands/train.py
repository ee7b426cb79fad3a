"""``gtpo-verl train`` and ``python -m gtpo_verl.train``: one training run, from Hydra overrides to a trained model."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gtpo_verl import preflight
from gtpo_verl.config import GROUPS, choices, compose_config, prepare, with_hardware
from gtpo_verl.planning.findings import idle_findings
from gtpo_verl.runs.session import training_session

EPILOG = """\
examples:
  gtpo-verl train algo=gtpo actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B \\
      data.train_files=train.parquet data.val_files=val.parquet trainer.n_gpus_per_node=8
  gtpo-verl train algo=dapo setting=quickstart hardware=cpu ...      the same job without a GPU
  gtpo-verl train algo=grpo_s algorithm.grpo_s.beta2=0.2 ...         every key can be overridden
  gtpo-verl train algo=gtpo algorithm.entropy.source=rollout ...     entropies from vLLM, no old-log-prob pass
  gtpo-verl train algo=ladder/3_clip_higher ...                      a row of DAPO's Table 1: 1_naive_grpo,
                                                                     2_overlong_filtering, 3_clip_higher,
                                                                     4_soft_overlong, 5_token_level_loss, 6_dapo
  gtpo-verl train algo=gtpo --cfg                                    print the configuration and stop
  gtpo-verl train setting=paper_gtpo_32b hardware=gpu ... --check    validate the run, also on a machine without a GPU

Ctrl-C finishes the step, saves a checkpoint and stops; a second Ctrl-C stops at once. To resume, repeat the command
with the same trainer.run_dir.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    groups = "; ".join(f"{group}= {' | '.join(choices(group))}" for group in GROUPS)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help=f"Hydra overrides over verl's configuration. Groups: {groups}"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--cfg", action="store_true", help="print the composed configuration, unchecked, and stop")
    what.add_argument("--check", action="store_true", help="check all that can be checked without a GPU and stop")


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    overrides, note = with_hardware(args.overrides)
    config = compose_config(overrides)
    if args.cfg:
        print(OmegaConf.to_yaml(config))
        return 0
    prepare(config, overrides)
    for finding in idle_findings(config, overrides):
        print(f"{finding.level}: {finding.message}", flush=True)
    preflight.check(config)
    if note:  # after the checks: an error must be the only line on stderr
        print(note, file=sys.stderr)
    if args.check:
        from gtpo_verl.integrations.launch import export_environment, validate

        export_environment(config)
        validate(config)
        print(
            f"This run is valid: {devices(config)}. `gtpo-verl plan` with the same overrides estimates memory and time."
        )
        return 0
    return launch(config, args.overrides)


def devices(config: DictConfig) -> str:
    """The devices that a run needs, in words."""
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM") == "cpu":
        return f"{nodes * each} rank{'s' * (nodes * each > 1)} on CPUs"
    asked = f"{nodes} node{'s' * (nodes > 1)} of {each} GPU{'s' * (each > 1)}"
    if config.trainer.v1.trainer_mode != "separate_async":
        return asked
    rollout = config.actor_rollout_ref.rollout
    return f"{asked}, and {rollout.nnodes} of {rollout.n_gpus_per_node} for the rollout's own servers"


def launch(config: DictConfig, overrides: Sequence[str]) -> int:
    """Check the run, start Ray, run the job and shut Ray down; returns the exit code.

    Args:
        config: checked and complete.
        overrides: as the user typed them, for the record.
    """
    from gtpo_verl.integrations.launch import check_gpus, check_ray, export_environment, run_job, validate

    export_environment(config)
    validate(config)
    check_ray(config)
    check_gpus(config)

    run_dir = Path(config.trainer.run_dir)
    command = shlex.join(["gtpo-verl", "train", *overrides])
    resolved = OmegaConf.to_yaml(config, resolve=True)
    with training_session(run_dir, config=resolved, command=command, overrides=overrides):
        print(f"Run: {run_dir}\nTo resume it, repeat the command with trainer.run_dir={run_dir}", flush=True)
        run_job(config)
    return 0
