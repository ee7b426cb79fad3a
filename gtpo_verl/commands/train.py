"""``gtpo-verl train`` and ``python -m gtpo_verl.train``: one training run, from Hydra overrides to a trained model."""

import argparse
import shlex
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.config import check_path_in_job, compose_config, prepare, print_config, print_info, with_hardware
from gtpo_verl.errors import UserError
from gtpo_verl.runs.checkpoints import link_checkpoints, repair_tracker
from gtpo_verl.runs.continuation import changes
from gtpo_verl.runs.directory import set_aside
from gtpo_verl.runs.session import training_session
from gtpo_verl.runs.terminal import LOG_FILE, following, outlive_terminal, printing_to

# Hydra's, the default first
CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")

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
  gtpo-verl train --config-dir conf algo=mine ...                    conf/algo/mine.yaml
  gtpo-verl train --multirun algo=dapo,gtpo seed=1,2 ...             the same as `gtpo-verl sweep --local`
  gtpo-verl train setting=paper_gtpo_32b hardware=gpu ... --check    validate the run, also on a machine without a GPU

A model is a name on the hub or a directory: `hf download NAME --local-dir DIR` makes one.
Ctrl-C finishes the step, saves a checkpoint and stops; a second Ctrl-C stops at once. To resume, repeat the command
with the same trainer.run_dir. All that the run prints is in train.log there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        "overrides",
        "--config-dir",
        ("--resolve", False, "with --cfg: resolve interpolations"),
        ("--package,-p KEY", str, "with --cfg: print this section alone"),
        ("--verbose", False, "show all that the run prints, from every process"),
    )
    what = parser.add_mutually_exclusive_group()
    for flags, values, text in (
        (("--cfg", "-c"), CFG, "print the composed configuration, unchecked, and stop (default: job)"),
        (("--info", "-i"), INFO, "print how it is composed and stop"),
    ):
        what.add_argument(*flags, nargs="?", const=values[0], metavar="|".join(values), help=text)
    declare(
        what,
        ("--check", "check all that can be checked without a GPU and stop"),
        ("--multirun,-m", False, "train every value: `gtpo-verl sweep --local`"),
    )
    declare(parser, "--allow-changes", "--wait")


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    for flag, values in (("cfg", CFG), ("info", INFO)):
        value = getattr(args, flag)
        if value is not None and value not in values:  # argparse has taken the override behind a flag for its value
            args.overrides.insert(0, value)
            setattr(args, flag, values[0])
    args.overrides = overrides_of(args)
    if args.multirun:
        from gtpo_verl.experiments.run import Where
        from gtpo_verl.experiments.run import train as train_all

        return train_all(args.overrides, None, Where(local=True))
    if (args.resolve or args.package) and args.cfg is None:
        raise UserError(f"{'--resolve' if args.resolve else '--package'} goes with --cfg.")
    overrides, note = with_hardware(args.overrides)
    config = compose_config(overrides)
    if args.cfg is not None:
        print_config(overrides, args.cfg, package=args.package, resolve=args.resolve)
        return 0
    if args.info is not None:
        print_info(overrides, args.info)
        return 0
    check_path_in_job("trainer.run_dir", config.trainer.run_dir)
    prepare(config, overrides)
    from gtpo_verl.rules import stages  # imports torch, which --help does without

    stages.check(config, overrides)
    if note:  # after the checks: an error must be the only line on stderr
        print(note, file=sys.stderr)
    if args.check:
        from gtpo_verl.integrations.launch import export_environment, validate

        export_environment(config)
        validate(config, to_start=False)
        print(
            f"This run is valid: {devices(config)}. `gtpo-verl plan` with the same overrides estimates memory and time."
        )
        return 0
    return launch(config, args)


def devices(config: DictConfig) -> str:
    """The devices that a run needs, in words."""
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM") == "cpu":
        return f"{nodes * each} rank{'s' * (nodes * each > 1)} on CPUs"
    asked = f"{nodes} node{'s' * (nodes > 1)} of {each} GPU{'s' * (each > 1)}"
    guide = config.algorithm.guide
    if guide.mode != "off" and guide.source == "server":
        asked += f", and {guide.replicas} of {guide.tensor_parallel_size} for the guide"
    if config.trainer.v1.trainer_mode != "separate_async":
        return asked
    rollout = config.actor_rollout_ref.rollout
    return f"{asked}, and {rollout.nnodes} of {rollout.n_gpus_per_node} for the rollout's own servers"


def launch(config: DictConfig, args: argparse.Namespace) -> int:
    """Check the run, start Ray, run the job and shut Ray down; returns the exit code."""
    from gtpo_verl.integrations.launch import export_environment, run_job, validate
    from gtpo_verl.planning.memory import known_host_memory, total_of
    from gtpo_verl.planning.step import total_steps
    from gtpo_verl.rules.start import find_start

    outlive_terminal()
    export_environment(config)
    validate(config, to_start=True)
    print(f"This run is valid: {devices(config)}.", flush=True)

    run_dir = Path(config.trainer.run_dir)
    command = shlex.join(["gtpo-verl", "train", *args.overrides])
    resolved = OmegaConf.to_yaml(config, resolve=True)
    steps = total_steps(config)
    changed = changes(run_dir, config)
    with training_session(run_dir, config=resolved, command=command, overrides=args.overrides) as record:
        link_checkpoints(run_dir, Path(config.trainer.default_local_dir))
        start = find_start(config)  # again, now that no other training writes to the directory
        if start.message and start.folder:
            repair_tracker(start.folder)
        if start.folder:
            print(f"Resuming from {start.folder.name} of {steps or '?'} steps.", flush=True)
            record.goes_on(start.step, changed)
        again = set_aside(run_dir, start.step)
        if again:
            which = f"steps {again[0]} to {again[-1]}" if len(again) > 1 else f"step {again[0]}"
            print(f"note: training again from here; what was logged of {which} is in *.replaced.jsonl now.", flush=True)
        print(
            f"Run: {run_dir}\nTo resume it, repeat the command with trainer.run_dir={run_dir}\n"
            f"Starting Ray, the trainer and vLLM; all they print is in {run_dir / LOG_FILE}",
            flush=True,
        )
        with printing_to(run_dir / LOG_FILE), following(run_dir, steps, verbose=args.verbose):
            memory = total_of(known_host_memory(config) or {})
            run_job(config, wait=args.wait, memory=memory)
    return 0
