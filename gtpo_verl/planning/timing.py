"""How long a step may take: floating-point operations and bytes, divided by speeds that are assumed, given or measured.

Every number that is not in the configuration is an :class:`Assumption` with its origin, printed with the plan. The
estimate is simple on purpose; a measured run of any size replaces the assumptions (``planning.measured``).
"""

import math
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.standalone import guide_of, guide_servers
from gtpo_verl.planning.memory import GIB, Engine, checkpoints_activations, engine_of
from gtpo_verl.planning.parallel import Parallelism
from gtpo_verl.planning.shapes import ModelShape, load_shape
from gtpo_verl.planning.step import Lengths, Step, skips_old_log_prob
from gtpo_verl.planning.transfers import (
    Network,
    checkpoint_seconds,
    offload_seconds,
    old_log_prob_seconds,
    update_seconds,
    weight_sync_seconds,
)


@dataclass(frozen=True)
class GPU:
    """A GPU's data sheet: dense bfloat16 TFLOP/s, memory bandwidth in GB/s, GiB as torch reports them, and GB/s in one
    direction to the other GPUs of its node (NVLink, or PCIe without it) and to host memory (PCIe).
    """

    tflops: float
    bandwidth: float
    memory: float
    link: float
    host: float


GPUS = {
    "a100-40gb": GPU(312, 1555, 39.4, 300, 32),
    "a100-80gb": GPU(312, 2039, 79.1, 300, 32),
    "h100": GPU(989, 3350, 79.1, 450, 64),
    "h200": GPU(989, 4800, 139.8, 450, 64),
    "h800": GPU(989, 3350, 79.1, 200, 64),  # NVLink of 400 GB/s in both directions
    "h20": GPU(148, 4000, 95.1, 450, 64),
    "b200": GPU(2250, 8000, 178.4, 900, 64),
    "l40s": GPU(362, 864, 44.4, 32, 32),
    "a10": GPU(125, 600, 22.0, 32, 32),
}


@dataclass(frozen=True)
class Assumption:
    """A number that the configuration does not hold, its unit and where it comes from."""

    value: float
    unit: str
    origin: str

    @property
    def measured(self) -> bool:
        """Whether it is from a run."""
        return self.origin.startswith("measured")

    def told(self, name: str) -> str:
        """How the user knows it: by the option, or by where it comes from."""
        return f"--assume {name}={self.value:g}" if self.origin == "given" else f"{name}={self.value:g} ({self.origin})"


Assumptions = dict[str, Assumption]

# name: (value, unit, why this value)
DEFAULTS: dict[str, tuple[float, str, str]] = {
    "update_efficiency": (0.35, "of peak FLOP/s", "default: dense models with checkpointing; compare verl's perf/mfu"),
    "log_prob_efficiency": (0.40, "of peak FLOP/s", "default: a forward pass without gradients"),
    "decode_bandwidth": (0.60, "of peak bytes/s", "default: attention and small matrices do not reach the peak"),
    "decode_overhead": (0.004, "s per iteration", "default: scheduler, sampler and collectives"),
    "other_share": (0.03, "of the step", "default: verl's published 7B DAPO step, 10 of 356 s"),
    "gpu_network": (50, "GB/s per GPU", "default: a port of 400 Gb/s for every GPU"),
    "transfer_efficiency": (0.7, "of nominal bytes/s", "default: collectives and copies do not reach it"),
    "weight_sync_bandwidth": (8.25, "GB/s", "verl's published: 30B in 7 s by its nccl engine, without vLLM's loading"),
    "storage_bandwidth": (2.0, "GB/s", "default: of the file system for one checkpoint, over all nodes; not measured"),
}  # fmt: skip

ADVANTAGE_BENCHMARK = "benchmarks/bench_methods.py on one CPU core"


def default_assumptions(config: DictConfig, gpu: str) -> Assumptions:
    """The assumptions before anything is measured or given."""
    from gtpo_verl.algorithms.registry import Algorithm, algorithm_of  # it imports torch, which --help does without

    data, sheet, origin = config.data, GPUS[gpu], f"data sheet: {gpu}"
    groups, tokens, generated = config.algorithm.filter_groups, "tokens, mean", "of generated groups"
    method, guide = algorithm_of(config) or Algorithm, guide_of(config)
    found = {
        **DEFAULTS,
        "prompt_length": (min(256, data.max_prompt_length), tokens, "default: a mathematical problem"),
        "response_length": (data.max_response_length / 2, tokens, "default: half the limit"),
        "sampling_yield": (1.0, generated, "dynamic sampling is off"),
        "advantage_ns": (method.advantage_ns, "ns per token", f"default: {ADVANTAGE_BENCHMARK}"),
        "gpu_tflops": (sheet.tflops, "TFLOP/s, dense bfloat16", origin),
        "gpu_bandwidth": (sheet.bandwidth, "GB/s", origin),
        "gpu_memory": (sheet.memory, "GiB", origin),
        "gpu_link": (sheet.link, "GB/s, one direction", origin),
        "host_link": (sheet.host, "GB/s, one direction", origin),
    }
    if groups.enable:
        found["sampling_yield"] = (0.5, generated, "default: dynamic sampling keeps half of the groups")
    if guide.served and guide.mixed:
        found["guided_share"] = (1.0, generated, "algorithm.guide.mode: rows of the guide in every group")
    elif guide.served:
        found["guided_share"] = (0.5, generated, "default: all first responses are wrong in half of them")
    return {name: Assumption(*item) for name, item in found.items()}


def check_assumptions(assumptions: Assumptions, config: DictConfig) -> None:
    """Reject values out of range. Raises UserError: the value and its range."""
    for name, item in assumptions.items():
        share = item.unit.startswith("of ")
        zero = item.value == 0 and name != "other_share"
        if zero or not 0 <= item.value < math.inf or (share and item.value > 1):
            faster = ": the run's GPUs are faster than those of --gpu" if "efficiency" in name and item.measured else ""
            raise UserError(f"{item.told(name)}: it must be above 0{' and at most 1' if share else ''}{faster}.")
    if assumptions["other_share"].value == 1:
        raise UserError(f"{assumptions['other_share'].told('other_share')}: the phases of the step would take no time.")
    if not config.algorithm.filter_groups.enable and assumptions["sampling_yield"].value != 1:
        raise UserError(
            f"{assumptions['sampling_yield'].told('sampling_yield')}: algorithm.filter_groups.enable is false, so all "
            "groups are trained on."
        )
    for name, limit in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        if assumptions[name].value > config.data[limit]:
            remedy = f": give --{name.replace('_', '-')}" if assumptions[name].measured else ""
            raise UserError(f"{assumptions[name].told(name)}: the limit is data.{limit}={config.data[limit]}{remedy}.")


@dataclass(frozen=True)
class StepTime:
    """Seconds of each phase of a step; a replica decodes ``concurrent`` responses at once (0 if speed was measured).
    ``guide``: what generation takes longer because of one. Of a measured run, it and the transfers are in their phase.
    """

    generate: float
    old_log_prob: float
    advantage: float
    update: float
    other: float
    concurrent: int
    weight_sync: float = 0.0
    offload: float = 0.0
    checkpoint: float = 0.0
    guide: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in PHASES)

    def to_dict(self) -> dict[str, float]:
        """JSON-ready."""
        return {name: getattr(self, name) for name in (*PHASES, "total", "concurrent")}


PHASES = {  # of a StepTime, and what a plan calls them
    "generate": "generation",
    "guide": "waiting for the guide",
    "old_log_prob": "old log-probs",
    "advantage": "advantages",
    "update": "updates",
    "weight_sync": "weight sync",
    "offload": "offload",
    "checkpoint": "checkpoint, its share",
    "other": "other",
}


def forward_flops(shape: ModelShape, sequences: float, length: float) -> float:
    """Floating-point operations of a forward pass: two per parameter and token, and causal attention."""
    attention = 2 * shape.layers * shape.heads * shape.head_size * length
    return sequences * length * (2 * shape.matmul_parameters + attention)


def passes_of_update(config: DictConfig, parallel: Parallelism) -> int:
    """Cost of a step's updates in forward passes, per epoch 3 (the backward counts as 2), or 4 with checkpointing."""
    return config.actor_rollout_ref.actor.ppo_epochs * (4 if checkpoints_activations(config, parallel) else 3)


def step_time(
    config: DictConfig, shape: ModelShape, parallel: Parallelism, step: Step, engine: Engine, assumptions: Assumptions
) -> StepTime:
    """Estimate the seconds of one step."""
    values = {name: item.value for name, item in assumptions.items()}
    lengths = Lengths(values["prompt_length"], values["response_length"])
    peak = values["gpu_tflops"] * 1e12 * parallel.gpus
    forward = forward_flops(shape, step.responses, lengths.whole)
    update = passes_of_update(config, parallel) * forward / (peak * values["update_efficiency"])
    old_log_prob = 0.0 if skips_old_log_prob(config) else forward / (peak * values["log_prob_efficiency"])
    advantage = step.responses * lengths.response * values["advantage_ns"] * 1e-9
    transfers, guide, concurrent = (0.0, 0.0, 0.0), 0.0, 0
    if "generated_tokens_per_gpu" in values:  # measured: its phases hold the transfers
        generate = step.generated_tokens / (values["generated_tokens_per_gpu"] * parallel.gpus)
    else:
        decoder = _Decoder(config, shape, engine, lengths, values, parallel.replicas, parallel.rollout_tensor)
        concurrent = decoder.concurrent(min(_window(config, step), step.generated_prompts) * step.responses_per_prompt)
        generate = _generation(decoder, step, concurrent)
        guide = _guide_wait(decoder, step, generate)
        network = Network.of(config, values)
        update = update_seconds(config, shape, parallel, step, network, update)
        if old_log_prob:
            old_log_prob = old_log_prob_seconds(shape, parallel, step, network, old_log_prob)
        transfers = (
            weight_sync_seconds(shape, values),
            offload_seconds(config, shape, parallel, network),
            checkpoint_seconds(config, shape, parallel, values),
        )
    phases = generate + guide + old_log_prob + advantage + update + sum(transfers)
    other = phases * values["other_share"] / (1 - values["other_share"])
    return StepTime(generate, old_log_prob, advantage, update, other, concurrent, *transfers, guide)


@dataclass(frozen=True)
class _Decoder:
    """Rollout replicas that decode responses of these mean lengths; `values` are the assumptions."""

    config: DictConfig
    shape: ModelShape
    engine: Engine
    lengths: Lengths
    values: dict[str, float]
    replicas: int
    tensor: int

    @property
    def flops(self) -> float:
        """Of one replica, FLOP/s."""
        return self.values["gpu_tflops"] * 1e12 * self.values["log_prob_efficiency"] * self.tensor

    def concurrent(self, responses: float) -> int:
        """Responses that a replica decodes at once: limited by those in flight, max_num_seqs and the KV cache."""
        in_cache = int(self.engine.kv_tokens / self.lengths.whole)
        most = self.config.actor_rollout_ref.rollout.max_num_seqs
        return max(1, min(math.ceil(responses / self.replicas), most, in_cache))

    def iteration(self, running: int, context: float) -> float:
        """Seconds to decode one token of each running response; the weights and every response's cache are read."""
        read = self.engine.weights + running * context * self.engine.kv_bytes_per_token
        reading = read / (self.values["gpu_bandwidth"] * 1e9 * self.values["decode_bandwidth"])
        computing = 2 * self.shape.matmul_parameters * running / self.flops
        return self.values["decode_overhead"] + max(reading, computing)

    def bulk(self, responses: float, concurrent: int) -> float:
        """Seconds to decode so many responses of mean length, ``concurrent`` of them at once."""
        iterations = responses * self.lengths.response / concurrent
        return iterations * self.iteration(concurrent, self.lengths.prompt + self.lengths.response / 2)


def _window(config: DictConfig, step: Step) -> int:
    """Prompts that may be in flight at once."""
    groups = config.algorithm.filter_groups
    return groups.max_inflight_gen_batches * step.prompts if groups.enable else step.generated_prompts


def _generation(decoder: _Decoder, step: Step, concurrent: int) -> float:
    """Seconds of generation: prefill, bulk of the decoding, and a tail in which the longest response runs alone."""
    lengths, limit = decoder.lengths, decoder.config.data.max_response_length
    bulk = decoder.bulk(math.ceil(step.generated_responses / decoder.replicas), concurrent)
    # what the longest response has left when an average one is done; of refilled prompts the last may be the longest
    alone = limit - lengths.response if _window(decoder.config, step) >= step.generated_prompts else limit
    tail = alone * decoder.iteration(1, lengths.prompt + limit / 2)
    prefilled = forward_flops(decoder.shape, step.generated_prompts / decoder.replicas, lengths.prompt)
    return bulk + tail + prefilled / decoder.flops


def _guide_wait(decoder: _Decoder, step: Step, generate: float) -> float:
    """Seconds that a guide adds to a step's generation: a response of mean length behind the last first one that is
    judged, by the policy or the guide, whichever is slower; and servers that do not keep up with the policy.
    """
    guide, served, values = guide_of(decoder.config), guide_servers(decoder.config), decoder.values
    if not guide.reserved:
        return 0.0
    by_policy = 0.0 if guide.mixed == guide.reserved else decoder.bulk(1, 1)
    if served is None:
        return by_policy
    size, shape = guide.tensor_parallel_size, load_shape(str(guide.model))
    engine = engine_of(served, shape, values["gpu_memory"] * GIB)
    decoder = replace(decoder, shape=shape, engine=engine, replicas=guide.replicas, tensor=size)
    rows = values["guided_share"] * step.generated_prompts * guide.reserved
    busy = decoder.bulk(rows / decoder.replicas, decoder.concurrent(rows))
    return max(busy - generate, 0.0) + max(decoder.bulk(1, 1), by_policy)


def given_assumptions(assumptions: Assumptions, given: dict[str, float]) -> Assumptions:
    """Replace assumptions by the user's ``--assume NAME=VALUE``. Raises UserError: no assumption has that name."""
    if unknown := sorted(given.keys() - assumptions.keys()):
        raise UserError(f"--assume {unknown[0]}: no such assumption; there are {', '.join(sorted(assumptions))}.")
    return assumptions | {name: replace(assumptions[name], value=it, origin="given") for name, it in given.items()}
