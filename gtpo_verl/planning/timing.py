"""How long a step may take: floating-point operations and bytes over the speed that is assumed, given or measured.

Every number that is not in the configuration is an :class:`Assumption` with its origin, printed with the plan. The shape of the estimate
is simple on purpose; a measured run of any size replaces what is assumed.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.planning.memory import Engine, checkpoints_activations
from gtpo_verl.planning.parallel import Parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape
from gtpo_verl.planning.step import Lengths, Step, check_batches, skips_old_log_prob
from gtpo_verl.runs.directory import METRICS_FILE, read_metrics_from


@dataclass(frozen=True)
class GPU:
    """A GPU's data sheet: dense bfloat16 TFLOP/s, memory bandwidth in GB/s, and GiB as torch reports them."""

    tflops: float
    bandwidth: float
    memory: float


GPUS = {
    "a100-40gb": GPU(312, 1555, 39.4),
    "a100-80gb": GPU(312, 2039, 79.1),
    "h100": GPU(989, 3350, 79.1),
    "h200": GPU(989, 4800, 139.8),
    "l40s": GPU(362, 864, 44.4),
    "a10": GPU(125, 600, 22.0),
}


@dataclass(frozen=True)
class Assumption:
    """A number that the configuration does not hold, its unit and where it comes from."""

    value: float
    unit: str
    origin: str


Assumptions = dict[str, Assumption]
YIELD = "training/filter_groups/yield"

# name: (value, unit, why this value)
DEFAULTS: dict[str, tuple[float, str, str]] = {
    "update_efficiency": (0.35, "of peak FLOP/s", "default: usual for dense models with activation checkpointing; verl logs perf/mfu"),
    "log_prob_efficiency": (0.40, "of peak FLOP/s", "default: a pass without gradients"),
    "decode_bandwidth": (0.60, "of peak bytes/s", "default: attention and small matrices do not reach the peak"),
    "decode_overhead": (0.004, "s an iteration", "default: scheduler, sampler, and collectives"),
    "other_share": (0.03, "of the step", "default: verl's published 7B DAPO step, 10 of 356 s"),
}  # fmt: skip

# benchmarks/bench_advantages.py, 1.5 M tokens on two cores of an AMD EPYC; verl's own estimator for DAPO
ADVANTAGE_NS = {"grpo": 41.0, "gtpo": 25.0, "grpo_s": 11.0}
ADVANTAGE_BENCHMARK = "benchmarks/bench_advantages.py on two CPU cores"


def default_assumptions(config: DictConfig, gpu: str) -> Assumptions:
    """What is assumed before anything is measured or given."""
    data, groups = config.data, config.algorithm.filter_groups
    sheet = GPUS[gpu]
    found = {name: Assumption(value, unit, origin) for name, (value, unit, origin) in DEFAULTS.items()}
    found["prompt_length"] = Assumption(
        min(256, data.max_prompt_length), "tokens, mean", "default: a problem in mathematics"
    )
    found["response_length"] = Assumption(data.max_response_length / 2, "tokens, mean", "default: half the limit")
    found["sampling_yield"] = (
        Assumption(0.5, "of generated groups", "default: dynamic sampling keeps every other group")
        if groups.enable
        else Assumption(1.0, "of generated groups", "dynamic sampling is off")
    )
    found["advantage_ns"] = Assumption(
        ADVANTAGE_NS.get(config.algorithm.adv_estimator, ADVANTAGE_NS["grpo"]),
        "ns a token",
        f"default: {ADVANTAGE_BENCHMARK}",
    )
    found["gpu_tflops"] = Assumption(sheet.tflops, "TFLOP/s, dense bfloat16", f"data sheet: {gpu}")
    found["gpu_bandwidth"] = Assumption(sheet.bandwidth, "GB/s", f"data sheet: {gpu}")
    found["gpu_memory"] = Assumption(sheet.memory, "GiB", f"data sheet: {gpu}")
    return found


def check_assumptions(assumptions: Assumptions, config: DictConfig) -> None:
    """Refuse values that mean nothing.

    Raises:
        UserError: the value, and its range.
    """
    for name, item in assumptions.items():
        share = item.unit.startswith("of ")
        if (
            not (0 <= item.value < math.inf)
            or (share and item.value > 1)
            or (item.value == 0 and name != "other_share")
        ):
            raise UserError(f"--assume {name}={item.value:g}: it must be above 0{' and at most 1' if share else ''}.")
    if assumptions["other_share"].value == 1:
        raise UserError("--assume other_share=1: nothing would be left for the step.")
    for name, limit in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        if assumptions[name].value > config.data[limit]:
            raise UserError(
                f"--assume {name}={assumptions[name].value:g}: the limit is data.{limit}={config.data[limit]}."
            )


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of one step; a replica decodes ``concurrent`` responses at once (0 where the speed was measured)."""

    generate: float
    old_log_prob: float
    advantage: float
    update: float
    other: float
    concurrent: int

    @property
    def total(self) -> float:
        return self.generate + self.old_log_prob + self.advantage + self.update + self.other

    def to_dict(self) -> dict[str, float]:
        """As JSON has it."""
        names = ("generate", "old_log_prob", "advantage", "update", "other", "total", "concurrent")
        return {name: getattr(self, name) for name in names}


def forward_flops(shape: ModelShape, sequences: float, length: float) -> float:
    """Floating-point operations of a forward pass: two a parameter and token, and causal attention (half of all pairs)."""
    attention = 2 * shape.layers * shape.heads * shape.head_size * length
    return sequences * length * (2 * shape.matmul_parameters + attention)


def update_flops(config: DictConfig, shape: ModelShape, parallel: Parallelism, step: Step, lengths: Lengths) -> float:
    """Operations of all updates of a step: forward, twice that backward, and forward again where activations are checkpointed."""
    passes = 4 if checkpoints_activations(config, parallel) else 3
    epochs = config.actor_rollout_ref.actor.ppo_epochs
    return epochs * passes * forward_flops(shape, step.responses, lengths.whole)


def step_time(
    config: DictConfig,
    shape: ModelShape,
    parallel: Parallelism,
    step: Step,
    engine: Engine,
    assumptions: Assumptions,
) -> StepTime:
    """Estimate the seconds of one step."""

    def value(name: str) -> float:
        return assumptions[name].value

    lengths = Lengths(value("prompt_length"), value("response_length"))
    peak = value("gpu_tflops") * 1e12 * parallel.gpus
    update = update_flops(config, shape, parallel, step, lengths) / (peak * value("update_efficiency"))
    scored = 0.0 if skips_old_log_prob(config) else forward_flops(shape, step.responses, lengths.whole)
    old_log_prob = scored / (peak * value("log_prob_efficiency"))
    advantage = step.responses * lengths.response * value("advantage_ns") * 1e-9
    if "generated_tokens_per_gpu" in assumptions:
        concurrent = 0
        generate = step.generated_tokens / (value("generated_tokens_per_gpu") * parallel.gpus)
    else:
        generate, concurrent = _generation(config, shape, parallel, step, engine, assumptions)
    phases = generate + old_log_prob + advantage + update
    other = phases * value("other_share") / (1 - value("other_share"))
    return StepTime(generate, old_log_prob, advantage, update, other, concurrent)


def _generation(
    config: DictConfig,
    shape: ModelShape,
    parallel: Parallelism,
    step: Step,
    engine: Engine,
    assumptions: Assumptions,
) -> tuple[float, int]:
    """Seconds of generation, and how many responses a replica decodes at once.

    A replica decodes its responses as many at a time as the KV cache, max_num_seqs and the prompts in flight allow. An iteration reads
    the weights and the cache of every running response. At the end the longest response goes on alone: to the limit, if all prompts
    were there from the start; otherwise the last to be refilled may be the longest, and all of it is waited for.
    """

    def value(name: str) -> float:
        return assumptions[name].value

    prompt, response = value("prompt_length"), value("response_length")
    limit = config.data.max_response_length
    share = math.ceil(step.generated_responses / parallel.replicas)
    in_cache = int(engine.kv_tokens / (prompt + response))
    groups = config.algorithm.filter_groups
    window = groups.max_inflight_gen_batches * step.prompts if groups.enable else step.generated_prompts
    in_flight = math.ceil(min(window, step.generated_prompts) * step.responses_per_prompt / parallel.replicas)
    concurrent = max(1, min(in_flight, config.actor_rollout_ref.rollout.max_num_seqs, in_cache))

    bandwidth = value("gpu_bandwidth") * 1e9 * value("decode_bandwidth")
    peak = value("gpu_tflops") * 1e12 * value("log_prob_efficiency") * parallel.rollout_tensor

    def iteration(running: int, context: float) -> float:
        reading = (engine.weights + running * context * engine.kv_bytes_per_token) / bandwidth
        return value("decode_overhead") + max(reading, 2 * shape.matmul_parameters * running / peak)

    bulk = share * response / concurrent * iteration(concurrent, prompt + response / 2)
    alone = limit - response if window >= step.generated_prompts else limit
    tail = alone * iteration(1, prompt + limit / 2)
    prefill = forward_flops(shape, step.generated_prompts / parallel.replicas, prompt) / peak
    return bulk + tail + prefill, concurrent


def given_assumptions(assumptions: Assumptions, given: dict[str, float]) -> Assumptions:
    """Replace what the user gives with ``--assume NAME=VALUE``.

    Raises:
        UserError: a name that is not assumed.
    """
    found = dict(assumptions)
    for name, number in given.items():
        if name not in found:
            raise UserError(f"--assume {name}: no such assumption; there are {', '.join(sorted(found))}.")
        found[name] = replace(found[name], value=number, origin="given")
    return found


# -------------------------------------------------------------------- a measured run


def measured_assumptions(assumptions: Assumptions, run_dir: Path) -> Assumptions:
    """Replace assumptions by what a run directory measured: lengths, yield, and the speed of each phase on its GPUs.

    The run may have another model, batch and number of GPUs: speeds are taken per GPU, from the operations of the run's own model. Medians
    over its steps; the first is left out where there are others, because it warms up.

    Raises:
        UserError: no run there, or none with a finished step.
    """
    if not (run_dir / METRICS_FILE).is_file() or not (run_dir / "config.yaml").is_file():
        raise UserError(
            f"--measured {run_dir}: no {METRICS_FILE} and config.yaml there; it must be the directory of a run."
        )
    config: Any = OmegaConf.load(run_dir / "config.yaml")
    lines, _ = read_metrics_from(run_dir, 0)
    by_step = {line["step"]: line["data"] for line in lines if "timing_s/update_actor" in line["data"]}
    if not by_step:
        raise UserError(f"--measured {run_dir}: it has no finished training step.")
    steps = [by_step[number] for number in sorted(by_step)]
    steps = steps[1:] or steps
    parallel = check_batches(config)
    shape = load_shape(config.actor_rollout_ref.model.path)
    gpus = parallel.gpus

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(of(data) for data in steps)

    def forward(data: dict[str, float]) -> float:
        length = data["prompt_length/mean"] + data["response_length/mean"]
        return forward_flops(shape, data["perf/total_num_tokens"] / length, length)

    def tokens(data: dict[str, float]) -> float:
        share = data["response_length/mean"] / (data["prompt_length/mean"] + data["response_length/mean"])
        return data["perf/total_num_tokens"] * share

    passes = 4 if checkpoints_activations(config, parallel) else 3
    passes *= config.actor_rollout_ref.actor.ppo_epochs
    peak = assumptions["gpu_tflops"].value * 1e12 * gpus
    origin = f"measured: {run_dir.name}, {len(steps)} steps on {gpus} GPUs"
    found = dict(assumptions)

    def put(name: str, value: float, unit: str) -> None:
        found[name] = Assumption(value, unit, origin)

    put("prompt_length", median(lambda data: data["prompt_length/mean"]), "tokens, mean")
    put("response_length", median(lambda data: data["response_length/mean"]), "tokens, mean")
    yields = [data[YIELD] for data in steps if YIELD in data]  # a step that lives on carried groups alone has none
    if yields:
        put("sampling_yield", statistics.median(yields), "of generated groups")
    put(
        "update_efficiency",
        median(lambda data: passes * forward(data) / data["timing_s/update_actor"]) / peak,
        "of peak FLOP/s",
    )
    if "timing_s/old_log_prob" in steps[0] and not skips_old_log_prob(config):
        put(
            "log_prob_efficiency",
            median(lambda data: forward(data) / data["timing_s/old_log_prob"]) / peak,
            "of peak FLOP/s",
        )
    put("advantage_ns", median(lambda data: data["timing_s/adv"] / tokens(data)) * 1e9, "ns a token")

    def generated(data: dict[str, float]) -> float:
        kept = data.get("training/filter_groups/kept_groups", 1.0)
        return tokens(data) * data.get("training/filter_groups/generated_groups", kept) / kept

    put(
        "generated_tokens_per_gpu", median(lambda data: generated(data) / data["timing_s/gen"]) / gpus, "tokens/s a GPU"
    )
    phases = ("gen", "old_log_prob", "adv", "update_actor")
    known = [sum(data.get(f"timing_s/{phase}", 0.0) for phase in phases) for data in steps]
    whole = [data["timing_s/step"] for data in steps]
    put(
        "other_share",
        statistics.median(max(1 - part / total, 0.0) for part, total in zip(known, whole, strict=True)),
        "of the step",
    )
    return found
