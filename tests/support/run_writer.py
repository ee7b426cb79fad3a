"""Run directories as a training leaves them, written from a model of a training whose true accuracy is known."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import yaml

from gtpo_verl.runs.provenance import FILE_KEYS

GAINS = {"dapo": 1.15, "gtpo": 1.75, "grpo_s": 1.45}  # of the logit of accuracy over the whole training
STEPS = 60
PROMPTS = 500
SAMPLES = 2


class RunWriter:
    """Writes runs under one directory; every number is drawn from one seeded generator."""

    def __init__(self, root: Path, seed: int = 0):
        self.root = root
        self.rng = np.random.default_rng(seed)

    def run(
        self,
        name: str = "quickstart",
        arms: Sequence[str] = ("dapo", "gtpo", "grpo_s"),
        status: str = "complete",
        planned: Sequence[str] | None = None,
        steps: int = STEPS,
        **options: object,
    ) -> Path:
        """A sweep over the algorithm alone, as a quickstart leaves it; ``options`` go to `arm`."""
        path = self.root / name
        for arm in arms:
            self.arm(path / arm, algorithm=arm, steps=steps, seed=7, record=status, **options)
        about = {
            "created": "2025-11-20T13:05:41+00:00",
            "command": "gtpo-verl quickstart --output outputs/quickstart",
            "notes": ["The model was warm-started on demonstrations with noise, so that it starts near 45 %."],
            "settings": {"task": "sums", "baseline accuracy": "0.450"},
        }
        self._sweep_file(path, {arm: [f"algo={arm}"] for arm in planned or arms}, {"algo": planned or arms}, about)
        return path

    @staticmethod
    def _sweep_file(path: Path, runs: dict, axes: dict, about: Mapping = MappingProxyType({})) -> None:
        facts = {
            "schema": 1,
            "name": path.name,
            "axes": {key: list(values) for key, values in axes.items()},
            "baseline": {"algo": axes["algo"][0]},
            "common": ["setting=quickstart"],
            "runs": {run: {"overrides": overrides} for run, overrides in runs.items()},
        }
        (path / "sweep.json").write_text(json.dumps({**facts, **about}))

    def sweep(
        self,
        name: str = "sweep",
        arms: Sequence[str] = ("dapo", "gtpo", "grpo_s"),
        seeds: Sequence[int] = range(8),
        statuses: Mapping[str, str] = {},
        spread: tuple[float, float] = (0.15, 0.12),
        **options: object,
    ) -> Path:
        """A sweep over arms and seeds with its ``sweep.json``.

        Args:
            name: of the directory.
            arms: algorithms, the baseline first.
            seeds: the other axis.
            statuses: by the name of a run; those that are not named are complete, and ``missing`` ones not written.
            spread: standard deviations of the gains, of what the arms of a seed share and of what they do not.
            options: go to `arm`.
        """
        path = self.root / name
        runs = {f"algo={arm},seed={seed}": [f"algo={arm}", f"seed={seed}"] for arm in arms for seed in seeds}
        shared = dict(zip(seeds, self.rng.normal(0, spread[0], len(seeds)), strict=True))
        for run, (algo, seed) in runs.items():
            status = statuses.get(run, "complete")
            if status == "missing":
                continue
            arm, number = algo.removeprefix("algo="), int(seed.removeprefix("seed="))
            gain = GAINS[arm] + shared[number] + self.rng.normal(0, spread[1])
            chosen = {"algorithm": arm, "seed": number, "gains": (gain,), "steps": STEPS, **options}
            if status != "complete":
                chosen["steps"] = STEPS // 2
            self.arm(path / run, record=status, **chosen)
        self._sweep_file(path, runs, {"algo": arms, "seed": [str(seed) for seed in seeds]})
        return path

    def arm(
        self,
        path: Path,
        algorithm: str = "gtpo",
        steps: int = STEPS,
        prompts: int = PROMPTS,
        samples: int = SAMPLES,
        every: int = 10,
        dumps: bool = True,
        config: bool = True,
        sources: Sequence[str] = ("arithmetic",),
        gains: Sequence[float] | None = None,
        name_sources: bool = True,
        per_cluster: int | None = None,
        bare: bool = False,
        seed: int | None = None,
        record: str | None = None,
    ) -> Path:
        """One arm: metrics (a bare one logs only its validation), validation samples and configuration.

        Prompts are dealt to the ``sources`` in turn; ``gains`` gives each its own, else all have the arm's. Samples
        name their source, as our trainer writes them, unless ``name_sources`` is off, as in verl's own dump. With
        ``per_cluster``, so many successive prompts share a cluster, and their difficulty. ``record``: the status in its
        ``run.json``, which is not written without one.
        """
        path.mkdir(parents=True)
        rng = self.rng
        difficulty = np.random.default_rng(99).normal(-0.2, 1.4, prompts)  # the same prompts in every arm
        if per_cluster:
            difficulty = difficulty[np.arange(prompts) // per_cluster]
        own_gains = gains or [GAINS.get(algorithm, 1.2)] * len(sources)
        gain = own_gains[0]
        lines = []
        for step in range(steps + 1):
            progress = gain * (1 - np.exp(-3 * step / STEPS)) / (1 - np.exp(-3))
            data = self._step(step, algorithm, progress) if step and not bare else {}
            if step % every == 0:
                progresses = np.resize(own_gains, prompts) * progress / gain
                chance = 1 / (1 + np.exp(-(difficulty + progresses)))
                verdicts = rng.random((prompts, samples)) < chance[:, None]
                for index, source in enumerate(sources):
                    part = verdicts[index :: len(sources)]
                    data[f"val-core/{source}/acc/mean@{samples}"] = float(part.mean())
                if dumps:
                    self.validation(path, step, verdicts, sources if name_sources else (), per_cluster)
            lines.append(json.dumps({"step": step, "data": data}))
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        if config:
            (path / "config.yaml").write_text(yaml.safe_dump(self._config(path, algorithm, seed)))
        if not bare:
            self._credit_samples(path, algorithm, steps)
        if record:
            (path / "run.json").write_text(json.dumps(self._record(path, algorithm, seed, record)))
        return path

    def validation(
        self,
        arm: Path,
        step: int,
        verdicts: np.ndarray,
        sources: Sequence[str] = (),
        per_cluster: int | None = None,
    ) -> None:
        """verl's dump, one line per sample, with the columns of our trainer; ``verdicts``: shape (prompts, samples)."""
        (arm / "validation").mkdir(exist_ok=True)
        lines = [
            json.dumps(
                {
                    "input": f"What is {number} + {number * 7 % 90}?",
                    "output": "= 1",
                    "gts": str(number + number * 7 % 90),
                    "score": float(verdict),
                    "step": step,
                    "reward": float(verdict),
                    "acc": bool(verdict),
                }
                | ({"data_source": sources[number % len(sources)]} if sources else {})
                | ({"cluster": f"cluster {number // per_cluster}"} if per_cluster else {})
            )
            for number, row in enumerate(verdicts)
            for verdict in row
        ]
        (arm / "validation" / f"{step}.jsonl").write_text("\n".join(lines) + "\n")

    def _credit_samples(self, path: Path, algorithm: str, step: int) -> None:
        """One correct and one wrong response of a prompt, as our trainer keeps them."""
        rng = np.random.default_rng(step)  # of its own: the other numbers stay as they were
        samples = []
        for correct, text in (
            (True, "47 + 38: 7 + 8 = 15 , carry 1 . 4 + 3 + 1 = 8 . = 85"),
            (False, "47 + 38: 7 + 8 = 14 . = 84"),
        ):
            tokens = [f"{word} " for word in text.split()]
            moved = np.zeros(len(tokens)) if algorithm == "dapo" else rng.gamma(1.0, 0.25, len(tokens))
            advantages = (1.1 + moved) * (1 if correct else -1)
            samples.append(
                {
                    "prompt": "What is 47 + 38?",
                    "correct": correct,
                    "group": [5, 3],
                    "length": len(tokens),
                    "tokens": tokens,
                    "advantages": advantages.round(4).tolist(),
                    "entropies": rng.gamma(1.0, 0.3, len(tokens)).round(4).tolist(),
                }
            )
        (path / "credit_samples.jsonl").write_text(json.dumps({"step": step, "samples": samples}) + "\n")

    @staticmethod
    def _record(path: Path, algorithm: str, seed: int | None, status: str) -> dict:
        reasons = {"failed": "UserError: vLLM died (server 0)", "interrupted": "stopped after a step, on request"}
        overrides = [f"algo={algorithm}", f"seed={seed}", "setting=quickstart", f"trainer.run_dir=outputs/{path.name}"]
        return {
            "name": path.name,
            "created": "2025-11-20T13:05:41+00:00",
            "command": f"gtpo-verl train {' '.join(overrides)}",
            "overrides": overrides,
            "seed": seed,
            "code": {"commit": "0123456789abcdef0123456789abcdef01234567", "diff": None},
            "versions": {"gtpo_verl": "0.1.0", "verl": "0.9.1", "vllm": "0.28.0", "torch": "2.13.0", "ray": "2.60.0"},
            "hardware": "2 CPU cores, x86_64, Python 3.11.7",
            "checksums": {key: f"{number}" * 64 for number, key in enumerate(FILE_KEYS)},
            "attempts": [
                {
                    "started": "2025-11-20T13:05:41+00:00",
                    "ended": None if status == "running" else "2025-11-20T13:25:10+00:00",
                    "status": status,
                    "exit_reason": reasons.get(status, "all steps were trained"),
                }
            ],
            "status": status,
            **({} if status == "running" else {"reason": reasons.get(status, "all steps were trained")}),
        }

    def _step(self, step: int, algorithm: str, progress: float) -> dict[str, float]:
        rng = self.rng
        accuracy = 1 / (1 + np.exp(-(progress - 0.15)))
        entropy = 0.62 * np.exp(-(0.5 if algorithm == "dapo" else 0.28) * step / STEPS)
        noise = rng.normal(0, 1, 12)
        data = {
            "training/accuracy": accuracy + 0.03 * noise[0],
            "critic/score/mean": accuracy - 0.02 + 0.03 * noise[0],
            "credit/entropy_all": entropy + 0.02 * noise[1],
            "credit/entropy_correct": 0.8 * entropy + 0.02 * noise[2],
            "credit/entropy_wrong": 1.3 * entropy + 0.03 * noise[3],
            "actor/entropy": entropy + 0.02 * noise[1],
            "response_length/mean": 21 + 3 * progress + 0.4 * noise[4],
            "actor/pg_clipfrac": abs(0.004 + 0.001 * noise[5]),
            "credit/advantage_spread": 0.0 if algorithm == "dapo" else abs(0.35 + 0.04 * noise[6]),
            "training/filter_groups/generated_groups": 24 / float(np.clip(0.88 - 0.1 * progress, 0, 1)),
            "training/filter_groups/yield": float(np.clip(0.88 - 0.1 * progress + 0.04 * noise[7], 0, 1)),
            "credit/degenerate_share": float(np.clip(0.12 + 0.1 * progress + 0.04 * noise[7], 0, 1)),
            "rollout_entropy/abs_diff_mean": 8e-7 * np.exp(0.2 * noise[8]),
            "rollout_entropy/abs_diff_max": 1e-5 * np.exp(0.3 * noise[9]),
            "timing_s/gen": 3.1 + 0.2 * noise[10],
            "timing_s/old_log_prob": 0.7,
            "timing_s/adv": 0.05 if algorithm == "dapo" else 0.09,
            "timing_s/update_actor": 2.3 + 0.1 * noise[11],
            "timing_s/update_weights": 0.35,
        }
        if algorithm != "dapo":
            data["credit/sign_flip_correct"] = abs(0.08 + 0.02 * noise[4])
            data["credit/sign_flip_wrong"] = abs(0.11 + 0.02 * noise[5])
        if step % 20 == 0:
            data["timing_s/save_checkpoint"] = 1.4
        data["timing_s/step"] = 0.15 + sum(value for key, value in data.items() if key.startswith("timing_s/"))
        if step % 10 == 0:
            data["timing_s/testing"] = 6.0
        return {key: float(value) for key, value in data.items()}

    @staticmethod
    def _config(path: Path, algorithm: str, seed: int | None) -> dict:
        estimator = {"dapo": "grpo"}.get(algorithm, algorithm)
        own = {} if seed is None else {"seed": seed}
        return own | {
            "data": {"seed": seed or 0, "train_files": "train.parquet", "val_files": "val.parquet"},
            "algorithm": {"adv_estimator": estimator, "gamma": 1.0, "correct_threshold": 1.0},
            "actor_rollout_ref": {
                "actor": {
                    "policy_loss": {"loss_mode": "grpo_s" if algorithm == "grpo_s" else "vanilla"},
                    "loss_agg_mode": "token-mean",
                    "optim": {"lr": 3e-4},
                },
                "model": {"path": "model"},
                "rollout": {"n": 8},
            },
            "reward": {"custom_reward_function": {"path": "pkg://gtpo_verl.tasks.sums.reward"}},
            "trainer": {"experiment_name": algorithm, "default_local_dir": str(path), "total_training_steps": STEPS},
            "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"TENSORBOARD_DIR": str(path / "tensorboard")}}}},
        }


@pytest.fixture(scope="session")
def run_writer() -> type[RunWriter]:
    """The class itself, for fixtures that write a run once for several tests."""
    return RunWriter


@pytest.fixture
def runs(tmp_path: Path) -> RunWriter:
    """Writes runs under ``tmp_path / "outputs"``."""
    return RunWriter(tmp_path / "outputs")
