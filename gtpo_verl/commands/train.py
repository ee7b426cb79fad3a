"""``gtpo-verl train`` and ``python -m gtpo_verl.train``: one training run, from Hydra overrides to a trained model."""

import argparse
import datetime as dt
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl import preflight
from gtpo_verl.config import GROUPS, choices, compose_config, prepare, with_hardware
from gtpo_verl.planning.findings import idle_findings
from gtpo_verl.runs.directory import STOP_FILE, write_record
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.provenance import hardware, run_versions

EPILOG = """\
examples:
  gtpo-verl train algo=gtpo actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B \\
      data.train_files=train.parquet data.val_files=val.parquet trainer.n_gpus_per_node=8
  gtpo-verl train algo=dapo setting=quickstart hardware=cpu ...      the same job without a GPU
  gtpo-verl train algo=grpo_s algorithm.grpo_s.beta2=0.2 ...         every key can be overridden
  gtpo-verl train algo=gtpo algorithm.entropy.source=rollout ...     credit by vLLM's entropies, without verl's old-log-prob pass
  gtpo-verl train algo=ladder/3_clip_higher ...                      a row of DAPO's Table 1: 1_naive_grpo, 2_overlong_filtering,
                                                                     3_clip_higher, 4_soft_overlong, 5_token_level_loss, 6_dapo
  gtpo-verl train algo=gtpo --cfg                                    print the configuration and stop
  gtpo-verl train setting=paper_gtpo_32b hardware=gpu ... --check    would it run? also where there is no GPU

Ctrl-C finishes the step, saves a checkpoint and stops; a second Ctrl-C stops at once. To go on, give the same
trainer.run_dir again.
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
    what.add_argument("--check", action="store_true", help="check everything that can be checked without GPUs and stop")


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
    if note:  # not before an error, which is to be the one line on stderr
        print(note, file=sys.stderr)
    if args.check:
        from gtpo_verl.integrations.launch import export_environment, validate

        export_environment(config)
        validate(config)
        print(f"This run is valid: {gpus(config)}. `gtpo-verl plan` with the same overrides says what it takes.")
        return 0
    return launch(config, command=shlex.join(["gtpo-verl", "train", *args.overrides]))


def gpus(config: DictConfig) -> str:
    """How many of what a run asks for, in words."""
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM") == "cpu":
        return f"{nodes * each} rank{'s' * (nodes * each > 1)} on CPUs"
    asked = f"{nodes} node{'s' * (nodes > 1)} of {each} GPU{'s' * (each > 1)}"
    if config.trainer.v1.trainer_mode != "separate_async":
        return asked
    rollout = config.actor_rollout_ref.rollout
    return f"{asked}, and {rollout.nnodes} of {rollout.n_gpus_per_node} for the rollout's own servers"


def launch(config: DictConfig, command: str) -> int:
    """Start Ray, run the job, and leave nothing running; returns the exit code."""
    from gtpo_verl.integrations.launch import check_gpus, check_ray, export_environment, validate

    export_environment(config)
    validate(config)
    check_ray(config)
    check_gpus(config)

    run_dir = Path(config.trainer.run_dir)
    with training_lock(run_dir):
        _train(config, command, run_dir)
    return 0


def _train(config: DictConfig, command: str, run_dir: Path) -> None:
    from gtpo_verl.integrations.launch import run_job

    (run_dir / STOP_FILE).unlink(missing_ok=True)
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    facts = {
        "name": run_dir.name,
        "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "versions": run_versions(),
        "hardware": hardware(),
    }
    print(
        f"Run: {run_dir}\nTo go on after an interruption, repeat the command with trainer.run_dir={run_dir}", flush=True
    )
    write_record(run_dir, facts | {"status": "running"})
    previous = signal.signal(signal.SIGINT, _Stopper(run_dir))
    try:
        run_job(config)
    except KeyboardInterrupt:
        write_record(run_dir, facts | {"status": "interrupted"})
        raise
    except Exception:
        write_record(run_dir, facts | {"status": "failed"})
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
    stopped = (run_dir / STOP_FILE).exists()
    write_record(run_dir, facts | {"status": "interrupted" if stopped else "complete"})
    (run_dir / STOP_FILE).unlink(missing_ok=True)
    link_model(run_dir)


class _Stopper:
    """First Ctrl-C: ask the trainer to stop after its step. Second: stop now."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def __call__(self, signum: int, frame: Any) -> None:
        stop = self.run_dir / STOP_FILE
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.", file=sys.stderr, flush=True)


def link_model(run_dir: Path) -> None:
    """Link ``model`` to the last checkpoint's weights in Hugging Face format, where the run saves them."""
    saved = sorted(
        run_dir.glob("checkpoints/global_step_*/actor/huggingface"),
        key=lambda path: int(path.parts[-3].rsplit("_", 1)[-1]),
    )
    if not saved or not any(saved[-1].glob("*.safetensors")):
        return
    link = run_dir / "model"
    link.unlink(missing_ok=True)
    link.symlink_to(saved[-1].relative_to(run_dir))
    print(f"Trained model: {link}", flush=True)
