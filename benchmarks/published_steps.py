"""The planner's estimates beside published step times, with the residual of every phase.

    python benchmarks/published_steps.py

No source states the mean length of the responses, on which every phase depends. It is inferred for each case, one
number, from the seconds of its updates: those match by construction and are not a result. Generation, old log-probs and
the step are predictions. Where one experiment was run on several numbers of GPUs, the length of the smallest is used
for the others: there every phase is a prediction. No constant of the planner was changed after these residuals were
seen. Writes `published-steps.json` and `.md` into benchmarks/results.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.config import compose_config, prepare
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.planning.timing import StepTime

RESULTS = Path(__file__).parent / "results"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PHASES = {"generation": "generate", "old log-probs": "old_log_prob", "updates": "update", "step": "total"}
ASYNC = "https://verl.readthedocs.io/en/latest/advance/fully_async.html"
ONE_STEP = "https://verl.readthedocs.io/en/latest/advance/one_step_off.html"
# Sizes of the same authors' scripts for these experiments; batch and lengths are in the tables' captions.
BATCH = (
    "data.train_batch_size=512",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ROLLOUT}.n=16",
    f"{ACTOR}.use_dynamic_bsz=true",
)
MODEL = ("actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B", "algorithm.filter_groups.enable=false", "algo=dapo")
SCRIPT = (f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.gpu_memory_utilization=0.8", "hardware=gpu")
FSDP = (f"{ACTOR}.fsdp_config.fsdp_size=8", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4")

MEGATRON = ("backend=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4")  # ours: not stated


@dataclass(frozen=True)
class Case:
    """A published step on H20 GPUs: seconds by phase. Cases of one ``experiment`` differ in the number of GPUs."""

    name: str
    experiment: str
    source: str
    gpus: int
    limit: int  # tokens of a response
    overrides: tuple[str, ...]
    published: dict[str, float]

    def config(self) -> Any:
        longest = 2048 + self.limit
        overrides = [
            *(
                *BATCH,
                *MODEL,
                *SCRIPT,
                *self.overrides,
                f"trainer.nnodes={self.gpus // 8}",
                "trainer.n_gpus_per_node=8",
            ),
            *("data.max_prompt_length=2048", f"data.max_response_length={self.limit}", "trainer.save_freq=-1"),
            *(f"{ACTOR}.ppo_max_token_len_per_gpu={2 * longest}", f"{ROLLOUT}.max_model_len={longest}"),
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu={3 * longest}",
        ]
        config = compose_config(overrides)
        prepare(config, overrides)
        return config


def case(name: str, experiment: str, gpus: int, limit: int, overrides: tuple[str, ...], *seconds: float) -> Case:
    source = ASYNC if experiment == "28k" else ONE_STEP
    return Case(name, experiment, source, gpus, limit, overrides, dict(zip(PHASES, seconds, strict=True)))


CASES = (
    case("7B DAPO, 32 H20, FSDP2, 28k", "28k", 32, 28672, FSDP, 357.41, 107.71, 313.81, 790.10),
    case("7B DAPO, 64 H20, FSDP2, 28k", "28k", 64, 28672, FSDP, 150.72, 70.26, 133.41, 365.28),
    case("7B DAPO, 128 H20, FSDP2, 28k", "28k", 128, 28672, FSDP, 177.85, 53.92, 113.81, 356.30),
    case("7B DAPO, 32 H20, FSDP2, 20k", "20k", 32, 20480, FSDP, 321, 88, 286, 749),
    case("7B DAPO, 32 H20, Megatron, 8k", "8k", 32, 8192, MEGATRON, 207, 119, 344, 699),
)  # fmt: skip


def estimate(config: Any, length: float, gpu: str = "h20") -> StepTime:
    time = make_plan(config, gpu=gpu, given={"response_length": length}).time
    assert time is not None
    return time


def inferred_length(seconds: Callable[[float], float], wanted: float, limit: int) -> float:
    """The mean length at which ``seconds`` is ``wanted``, by bisection; it grows with the length."""
    low, high = 1.0, float(limit)
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return low


def main() -> None:
    lengths: dict[str, float] = {}
    rows = []
    for case in CASES:
        config = case.config()
        inferred = case.experiment not in lengths
        if inferred:
            lengths[case.experiment] = inferred_length(
                lambda length, config=config: estimate(config, length).update, case.published["updates"], case.limit
            )
        time = estimate(config, lengths[case.experiment])
        estimated = {phase: getattr(time, name) for phase, name in PHASES.items()}
        rows.append(
            {
                "case": case.name,
                "source": case.source,
                "response_length": round(lengths[case.experiment]),
                "inferred_here": inferred,
                "published_s": case.published,
                "estimated_s": {phase: round(value, 1) for phase, value in estimated.items()},
                "residual": {phase: round(estimated[phase] / case.published[phase] - 1, 3) for phase in PHASES},
            }
        )
    others = large_model()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "published-steps.json").write_text(json.dumps({"steps": rows, "32B": others}, indent=2) + "\n")
    text = table(rows, others)
    (RESULTS / "published-steps.md").write_text(text)
    print(text)


def large_model() -> dict[str, Any]:
    """What is published of 32B without a breakdown: the share of generation, and the seconds of a weight sync."""
    overrides = ["setting=paper_dapo_32b", "algo=dapo", "hardware=gpu", "trainer.save_freq=-1"]
    config = compose_config(overrides)
    prepare(config, overrides)
    times = {length: estimate(config, length, gpu="h800") for length in (2000, 5000, 10000)}
    return {
        "generation_share": {length: round(time.generate / time.total, 2) for length, time in times.items()},
        "weight_sync_s": round(times[2000].weight_sync, 1),
    }


def table(rows: list[dict[str, Any]], others: dict[str, Any]) -> str:
    legend = "Estimated seconds, published seconds in brackets, the residual. * the length was inferred from it."
    lines = [legend, "", "| step | tokens | " + " | ".join(PHASES) + " |", "|---|---|" + "---|" * len(PHASES)]
    for row in rows:
        cells = []
        for phase in PHASES:
            mark = "*" if phase == "updates" and row["inferred_here"] else ""
            estimated, published, residual = (row[key][phase] for key in ("estimated_s", "published_s", "residual"))
            cells.append(f"{estimated:.0f} ({published:.0f}) {residual:+.0%}{mark}")
        lines.append(f"| {row['case']} | {row['response_length']:,} | " + " | ".join(cells) + " |")
    shares = ", ".join(f"{share:.0%} at {length:,} tokens" for length, share in others["generation_share"].items())
    large = (
        f"32B DAPO, 128 H800: generation is {shares} (published: about 70 %, at no stated length); a weight sync takes "
        f"{others['weight_sync_s']:g} s (published: 14 to 18 s, of no stated engine)."
    )
    return "\n".join([*lines, "", large, ""])


if __name__ == "__main__":
    main()
