"""Prints a plan as tables."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gtpo_verl.planning.memory import GIB, Memory, total_of
from gtpo_verl.planning.plan import Plan
from gtpo_verl.planning.timing import PHASES, StepTime
from gtpo_verl.problems import Problem

WIDTH = 130  # columns, if the output is not a terminal
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(plan: Plan, problems: Sequence[Problem]) -> None:
    """Print a plan and what is wrong with it to standard output."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table("One step", ("", "", ""), _step(plan)))
    if plan.memory is not None:
        _show_memory(plan, plan.memory, console)
    if plan.time is not None:
        _show_time(plan, plan.time, console)
    if plan.host_memory is not None:
        console.print(_sizes("Memory of the run's processes, GiB", plan.host_memory, "total"))
        console.print(
            f"All together {total_of(plan.host_memory) / GIB:.1f} GiB. For the time of a run without GPUs: --measured "
            "RUN.\n"
        )
    entropies = ("actor's entropies, MiB", "rollout's entropies, MiB")
    costs = [
        (
            arm.arm,
            "" if arm.pass_seconds is None else f"{arm.pass_seconds:,.1f}",
            f"{arm.entropy_bytes / 1024**2:,.0f}",
            f"{arm.rollout_bytes / 1024**2:,.0f}",
            f"{arm.advantage_seconds:.2f}",
        )
        for arm in plan.arms
    ]
    title = "Cost of each arm per step, beyond generation and updates"
    console.print(_table(title, ("", "old-log-prob pass, s", *entropies, "advantages, s"), costs, numbers=True))
    console.print("The pass computes verl's old log-probs; algorithm.entropy.source=rollout skips it.\n")
    assumed = [(name, f"{item.value:,.4g}", item.unit, item.origin) for name, item in sorted(plan.assumptions.items())]
    console.print(_table("Assumptions", ("name", "value", "unit", "origin"), assumed))
    if not problems:
        console.print("No known problem was found.")
    for problem in problems:
        line = f"{problem.severity}: {problem.message}"
        console.print(line, style=STYLES[problem.severity], markup=False, soft_wrap=True)


def _table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    total: Sequence[str] = (),
    *,
    numbers: bool = False,
) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=any(columns))
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if numbers and position else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if total:
        table.add_section()
        table.add_row(*total, style="bold")
    return table


def _step(plan: Plan) -> list[tuple[str, str, str]]:
    step, shape, parallel = plan.step, plan.shape, plan.parallel
    kinds = ("data", "tensor", "pipeline", "context", "sequence")
    sizes = {kind: getattr(parallel, kind) for kind in kinds}
    spread = " × ".join(f"{size} {kind}" for kind, size in sizes.items() if size > 1 or kind == "data")
    sharded = "" if parallel.megatron else f"; parameters sharded over {parallel.shard}"
    budget = "" if step.budget_prompts is None else f"; at most {step.budget_prompts:,} prompts"
    over = f"{step.sampling_overhead:+.0%} at a yield of {step.sampling_yield:g}"
    passes = f"{step.micro_batches_per_update} per update; {step.old_log_prob_micro_batches} in the old-log-prob pass"
    each = f"prompts × {step.responses_per_prompt}"
    return [
        ("model", shape.name, f"{shape.parameters:,} parameters; {shape.layers} layers; config {shape.source}"),
        ("GPUs", f"{parallel.gpus}", f"{'Megatron' if parallel.megatron else 'FSDP'}: {spread}{sharded}"),
        ("rollout engines", f"{parallel.replicas}", f"{parallel.rollout} GPU{'s' * (parallel.rollout > 1)} each"),
        ("responses", f"{step.responses:,}", f"{step.prompts} {each}"),
        ("mini-batch", f"{step.mini_batch_responses:,}", f"{step.mini_batch_prompts} {each}"),
        ("optimizer updates", f"{step.updates}", f"{step.updates * plan.total_steps:,} in {plan.total_steps} steps"),
        ("micro-batches per rank", f"{step.micro_batches_per_step}", passes),
        (
            "tokens trained on",
            _count(step.tokens),
            f"prompts and responses; longest sequence {step.longest_sequence:,}",
        ),
        ("tokens generated", _count(step.generated_tokens), f"{step.generated_prompts:,} prompts, {over}{budget}"),
    ]


def _show_memory(plan: Plan, memory: Memory, console: Console) -> None:
    engine = memory.engine
    console.print(_sizes("Memory per GPU, GiB", memory.phases, f"total, of {memory.capacity / GIB:.0f}"))
    console.print(
        f"Rollout engine: weights {engine.weights / GIB:.1f}, workspace {engine.workspace / GIB:.1f}, KV cache "
        f"{engine.kv_cache / GIB:.1f}: {engine.kv_tokens:,} tokens per replica, "
        f"{engine.kv_tokens // plan.step.longest_sequence:,} sequences of the maximum length.\n"
    )


def _sizes(title: str, columns: Mapping[str, Mapping[str, float]], total: str) -> Table:
    """{column: {component: bytes}} in GiB, with the sum of each column."""
    rows = []
    for name in dict.fromkeys(name for parts in columns.values() for name in parts):
        sizes = [parts.get(name, 0.0) / GIB for parts in columns.values()]
        if any(sizes):
            rows.append((name, *(f"{size:.1f}" if size else "" for size in sizes)))
    sums = (total, *(f"{sum(parts.values()) / GIB:.1f}" for parts in columns.values()))
    return _table(title, ("", *columns), rows, sums, numbers=True)


def _show_time(plan: Plan, time: StepTime, console: Console) -> None:
    seconds = {name: getattr(time, phase) for phase, name in PHASES.items()}
    rows = [(name, f"{value:,.1f}", f"{value / time.total:.0%}") for name, value in seconds.items() if value]
    total = ("step", f"{time.total:,.0f}", "")
    console.print(_table("Estimated time of a step", ("", "seconds", "share"), rows, total, numbers=True))
    hours = time.total * plan.total_steps / 3600
    each = f" A replica decodes {time.concurrent} responses at once." if time.concurrent else ""
    duration = f"{hours:,.0f} hours" if hours >= 10 else f"{hours:.1f} hours"
    gpu_hours = f"{hours * plan.parallel.gpus:,.0f} GPU-hours"
    console.print(f"{plan.total_steps} steps: {duration}, {gpu_hours}, without validation and verifier.{each}\n")


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
