"""Prints a plan as tables."""

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gtpo_verl.planning.memory import GIB
from gtpo_verl.planning.plan import Plan
from gtpo_verl.problems import Problem

WIDTH = 130  # columns, if the output is not a terminal
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(plan: Plan, problems: Sequence[Problem]) -> None:
    """Print a plan and what is wrong with it to standard output."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(_step(plan))
    if plan.memory is not None:
        console.print(_memory(plan), _engine_line(plan), "", sep="\n")
    if plan.time is not None:
        console.print(_time(plan), _run_line(plan), "", sep="\n")
    if plan.host_memory is not None:
        console.print(_host_memory(plan.host_memory), "For the time of a run without GPUs: --measured RUN.\n")
    console.print(_arms(plan))
    console.print("The pass computes verl's old log-probs; algorithm.entropy.source=rollout skips it.\n")
    console.print(_assumed(plan))
    if not problems:
        console.print("No known problem was found.")
    for problem in problems:
        line = f"{problem.severity}: {problem.message}"
        console.print(line, style=STYLES[problem.severity], markup=False, soft_wrap=True)


def _table(title: str, *columns: str, numbers: bool = False) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=any(columns))
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if numbers and position else "left", overflow="fold")
    return table


def _step(plan: Plan) -> Table:
    step, shape, parallel = plan.step, plan.shape, plan.parallel
    kinds = ("data", "tensor", "pipeline", "context", "sequence")
    sizes = {kind: getattr(parallel, kind) for kind in kinds}
    spread = " × ".join(f"{size} {kind}" for kind, size in sizes.items() if size > 1 or kind == "data")
    sharded = "" if parallel.megatron else f"; parameters sharded over {parallel.shard}"
    budget = f"at a yield of {step.sampling_yield:g}"
    budget += "" if step.budget_prompts is None else f"; at most {step.budget_prompts:,} prompts"
    each = f"prompts × {step.responses_per_prompt}"
    table = _table("One step", "", "", "")
    for row in (
        ("model", shape.name, f"{shape.parameters:,} parameters; {shape.layers} layers; config {shape.source}"),
        ("GPUs", f"{parallel.gpus}", f"{'Megatron' if parallel.megatron else 'FSDP'}: {spread}{sharded}"),
        ("rollout engines", f"{parallel.replicas}", f"{parallel.rollout} GPU{'s' * (parallel.rollout > 1)} each"),
        ("responses", f"{step.responses:,}", f"{step.prompts} {each}"),
        ("mini-batch", f"{step.mini_batch_responses:,}", f"{step.mini_batch_prompts} {each}"),
        ("optimizer updates", f"{step.updates}", f"{step.updates * plan.total_steps:,} in {plan.total_steps} steps"),
        (
            "micro-batches per rank",
            f"{step.micro_batches_per_step}",
            f"{step.micro_batches_per_update} per update; {step.old_log_prob_micro_batches} in the old-log-prob pass",
        ),
        (
            "tokens trained on",
            _count(step.tokens),
            f"prompts and responses; longest sequence {step.longest_sequence:,}",
        ),
        (
            "tokens generated",
            _count(step.generated_tokens),
            f"{step.generated_prompts:,} prompts, {step.sampling_overhead:+.0%} {budget}",
        ),
    ):
        table.add_row(*row)
    return table


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    assert memory is not None
    table = _table("Memory per GPU, GiB", "", *(phase.name for phase in memory.phases), numbers=True)
    names = list(dict.fromkeys(name for phase in memory.phases for name in phase.parts))
    for name in names:
        parts = [phase.parts.get(name, 0.0) / GIB for phase in memory.phases]
        if any(parts):
            table.add_row(name, *(f"{part:.1f}" if part else "" for part in parts))
    table.add_section()
    table.add_row(
        f"total, of {memory.capacity / GIB:.0f}", *(f"{phase.total / GIB:.1f}" for phase in memory.phases), style="bold"
    )
    return table


def _host_memory(parts: Mapping[str, float]) -> Table:
    table = _table("Memory of the run, GiB", "", "", numbers=True)
    for name, size in parts.items():
        table.add_row(name, f"{size / GIB:.1f}")
    table.add_section()
    table.add_row("total", f"{sum(parts.values()) / GIB:.1f}", style="bold")
    return table


def _engine_line(plan: Plan) -> str:
    assert plan.memory is not None
    engine = plan.memory.engine
    longest = engine.kv_tokens // plan.step.longest_sequence
    return (
        f"Rollout engine: weights {engine.weights / GIB:.1f}, workspace {engine.workspace / GIB:.1f}, KV cache "
        f"{engine.kv_cache / GIB:.1f}: {engine.kv_tokens:,} tokens per replica, {longest:,} sequences of the maximum "
        "length."
    )


def _time(plan: Plan) -> Table:
    time = plan.time
    assert time is not None
    table = _table("Estimated time of a step", "", "seconds", "share", numbers=True)
    rows = {
        "generation": time.generate,
        "waiting for the guide": time.guide,
        "old log-probs": time.old_log_prob,
        "advantages": time.advantage,
        "updates": time.update,
        "weight sync": time.weight_sync,
        "offload": time.offload,
        "checkpoint, its share": time.checkpoint,
        "other": time.other,
    }
    for name, seconds in rows.items():
        if not seconds:
            continue
        table.add_row(name, f"{seconds:,.1f}", f"{seconds / time.total:.0%}")
    table.add_section()
    table.add_row("step", f"{time.total:,.0f}", "", style="bold")
    return table


def _run_line(plan: Plan) -> str:
    assert plan.time is not None
    hours = plan.time.total * plan.total_steps / 3600
    each = f" A replica decodes {plan.time.concurrent} responses at once." if plan.time.concurrent else ""
    duration = f"{hours:,.0f} hours" if hours >= 10 else f"{hours:.1f} hours"
    gpu_hours = f"{hours * plan.parallel.gpus:,.0f} GPU-hours"
    return f"{plan.total_steps} steps: {duration}, {gpu_hours}, without validation and verifier.{each}"


def _arms(plan: Plan) -> Table:
    table = _table(
        "Cost of each arm per step, beyond generation and updates",
        "",
        "old-log-prob pass, s",
        "actor's entropies, MiB",
        "rollout's entropies, MiB",
        "advantages, s",
        numbers=True,
    )
    for arm in plan.arms:
        table.add_row(
            arm.arm,
            f"{arm.pass_seconds:,.1f}",
            f"{arm.entropy_bytes / 1024**2:,.0f}",
            f"{arm.rollout_bytes / 1024**2:,.0f}",
            f"{arm.advantage_seconds:.2f}",
        )
    return table


def _assumed(plan: Plan) -> Table:
    table = _table("Assumptions", "name", "value", "unit", "origin")
    for name, item in sorted(plan.assumptions.items()):
        table.add_row(name, f"{item.value:,.4g}", item.unit, item.origin)
    return table


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
