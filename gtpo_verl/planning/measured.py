"""Assumptions of a plan measured on a run: lengths, sampling yield, and the speed of each phase on its GPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.files import reading
from gtpo_verl.planning.parallel import parallelism
from gtpo_verl.planning.shapes import load_shape
from gtpo_verl.planning.step import skips_old_log_prob
from gtpo_verl.planning.timing import Assumption, Assumptions, forward_flops, passes_of_update
from gtpo_verl.runs.directory import CONFIG_FILE, METRICS_FILE
from gtpo_verl.runs.reader import read_metrics

FILTER = "training/filter_groups/"
PHASES = ("gen", "old_log_prob", "adv", "update_actor")  # as verl names them in timing_s/


def read_steps(run_dir: Path) -> tuple[Any, pd.DataFrame]:
    """The configuration of a run, and what its training steps logged, a row each; the first step is left out where
    there are others, because it warms up. Raises UserError: it is not a run directory, or no training step is finished.
    """
    if not (run_dir / METRICS_FILE).is_file() or not (run_dir / CONFIG_FILE).is_file():
        raise UserError(
            f"--measured {run_dir}: no {METRICS_FILE} and {CONFIG_FILE} there; it must be the directory of a run."
        )
    with reading(run_dir / CONFIG_FILE):
        config: Any = OmegaConf.load(run_dir / CONFIG_FILE)
        model = str(config.actor_rollout_ref.model.path)
    try:
        load_shape(model)
    except UserError as error:
        raise UserError(f"--measured {run_dir}: the model that it trained is not known here: {error}") from error
    logged, _ = read_metrics(run_dir / METRICS_FILE)
    steps = pd.DataFrame([dict(logged[step]) for step in sorted(logged) if "timing_s/update_actor" in logged[step]])
    if steps.empty:
        raise UserError(f"--measured {run_dir}: it has no finished training step.")
    return config, steps[1:] if len(steps) > 1 else steps


def measured_assumptions(assumptions: Assumptions, run_dir: Path, planned: DictConfig) -> Assumptions:
    """Replace assumptions of a planned run by the medians of what another measured, per GPU and by the operations of
    its own model; tokens generated per second by the ratio of the models' parameters. A value that it did not measure
    stays as it was, and the sampling yield where dynamic sampling is off. Raises UserError: see `read_steps`.
    """
    config, steps = read_steps(run_dir)
    parallel = parallelism(config)
    gpus, passes = parallel.gpus, passes_of_update(config, parallel)
    prompt, response = steps["prompt_length/mean"], steps["response_length/mean"]
    responses = steps["perf/total_num_tokens"] / (prompt + response)
    shape, other = (load_shape(str(each.actor_rollout_ref.model.path)) for each in (config, planned))
    forward = forward_flops(shape, responses, prompt + response)
    smaller = shape.matmul_parameters / other.matmul_parameters
    groups = steps.reindex(columns=[f"{FILTER}generated_groups", f"{FILTER}kept_groups"])
    generated = responses * response * (groups.iloc[:, 0] / groups.iloc[:, 1]).fillna(1.0)
    seconds = steps.filter(like="timing_s/").rename(columns=lambda name: name.removeprefix("timing_s/"))
    known = seconds.reindex(columns=PHASES).sum(axis=1)
    peak = assumptions["gpu_tflops"].value * 1e12 * gpus
    measured = {
        "prompt_length": (prompt, "tokens, mean"),
        "response_length": (response, "tokens, mean"),
        "update_efficiency": (passes * (forward / seconds["update_actor"]) / peak, "of peak FLOP/s"),
        "advantage_ns": (seconds["adv"] / (responses * response) * 1e9, "ns per token"),
        "generated_tokens_per_gpu": (generated / seconds["gen"] / gpus * smaller, "tokens/s per GPU"),
        "other_share": ((1 - known / seconds["step"]).clip(lower=0.0), "of the step"),
    }
    # a step trained entirely on groups carried over logs no yield
    if f"{FILTER}yield" in steps and planned.algorithm.filter_groups.enable:
        measured["sampling_yield"] = (steps[f"{FILTER}yield"], "of generated groups")
    # where the run skips the old-log-prob pass, its timer covers something else
    if not skips_old_log_prob(config) and "old_log_prob" in seconds:
        measured["log_prob_efficiency"] = (forward / seconds["old_log_prob"] / peak, "of peak FLOP/s")
    origin = f"measured: {run_dir.name}, {len(steps)} steps on {gpus} GPUs"
    found = {name: Assumption(float(values.median()), unit, origin) for name, (values, unit) in measured.items()}
    if smaller != 1:
        speed = found["generated_tokens_per_gpu"]
        found["generated_tokens_per_gpu"] = replace(speed, origin=f"{origin}, by parameters from {shape.name}")
    return assumptions | found
