"""``gtpo-verl audit``: how well each method's credit agrees with true advantages, or its gradient with the true one."""

import argparse
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from gtpo_verl.audit.plan import Plan
from gtpo_verl.commands.options import renamed, share
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.subject import Subject, configuration, find_subject
from gtpo_verl.integrations.checks import check_model
from gtpo_verl.rules.data import check_data
from gtpo_verl.rules.stages import check_evaluation
from gtpo_verl.rules.start import check_output
from gtpo_verl.runs.directory import now
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.runs.terminal import progress_over
from gtpo_verl.tasks.prepare import use_embedded_prompts

if TYPE_CHECKING:
    from rich.progress import TaskID

    from gtpo_verl.audit.methods import Method
    from gtpo_verl.audit.render import Table
    from gtpo_verl.audit.store import Store
    from gtpo_verl.evaluation.continuations import Continuation, Prefix
    from gtpo_verl.integrations.continuations import Prompts

EPILOG = """\
MODEL is a run, a checkpoint or a model, as for gtpo-verl eval; prompts are those of data.val_files, sampled as the
training samples (actor_rollout_ref.rollout.temperature and so on).

examples:
  gtpo-verl audit outputs/gtpo-20260101-120000 --check
  gtpo-verl audit outputs/gtpo-20260101-120000 --second-stage 12
  gtpo-verl audit Qwen/Qwen2.5-1.5B data.val_files=data/math-500.parquet trainer.n_gpus_per_node=8
  gtpo-verl audit outputs/gtpo-20260101-120000 --gradients 192 data.val_files=data/dapo-math-17k.parquet
  gtpo-verl audit --reanalyse outputs/gtpo-20260101-120000/audit/global_step_20 --methods gtpo,fork20,eapo

Ctrl-C keeps what is finished, and the same command goes on. docs/guides/audit.md explains the figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    default = Plan()
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a run, a checkpoint or a model, see below")
    share(parser, {"overrides": ""})
    for name, what, value in (
        ("prompts", "prompts with contrast, some of whose responses are correct and some wrong", "64, or 2 N"),
        ("samples", "responses sampled to each", "8, or a training's"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="P", help=f"{what} (default: {value} with --gradients N)")
    for name, what in {
        "responses": "responses audited, half of them wrong where there are enough",
        "steps": "steps of a response",
        "continuations": "continuations of each point",
        "second-stage": "responses that get more of them, for the picture",
        "second-continuations": "continuations of each of their points",
        "branches": "other steps sampled from each point, for the state oracle; 8 multiply the cost by five",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default: {value})")
    parser.add_argument(
        "--gradients",
        type=int,
        default=0,
        metavar="N",
        help="signal and noise of each method's gradient, from N groups with contrast, in the place of all the above",
    )
    parser.add_argument(
        "--gradient-params",
        type=_regular_expression,
        default="",
        metavar="REGEX",
        help="of parameters with such a name alone (default: all)",
    )
    parser.add_argument("--methods", default="", metavar="A,B", help="presets of algo= to score (default: all)")
    share(parser, {"--output": "default: RUN/audit/NAME, or outputs/audit-MODEL", "--fresh": ""})
    parser.add_argument("--check", dest="dry_run", action="store_true", help="print cost and power, and stop")
    renamed(parser, "--dry-run", "--check", "dry_run")
    parser.add_argument("--reanalyse", type=Path, metavar="DIR", help="compute the figures of an audit again")
    share(parser, {"--before": "", "--wait": ""})


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def run(args: argparse.Namespace) -> int:
    """Audit; returns the exit code."""
    if args.reanalyse is not None:
        return _reanalyse(args)
    if args.model is None:
        raise UserError("name what to audit: a run, a checkpoint or a model; or --reanalyse DIR.")
    plan = _plan(args)
    subject = find_subject(args.model, before=args.before)
    config = configuration(subject, args.overrides)
    if plan.gradients and args.samples is None:
        plan = replace(plan, samples=int(config.actor_rollout_ref.rollout.n))
    check_evaluation(config, args.overrides)
    output = check_output(args.output or _output(subject, plan))
    check_model(config)
    use_embedded_prompts(config)  # which takes minutes: what can be checked before is
    check_data(config, ("val_files",))
    methods = _methods(args.methods, args.overrides)
    if args.dry_run:
        _print_plan(plan, config, output, methods)
        return 0

    from gtpo_verl.integrations.launch import export_environment

    export_environment(config)
    from gtpo_verl.audit.store import Store, as_facts
    from gtpo_verl.evaluation.settings import settings_as_in_training
    from gtpo_verl.integrations.checks import check_with_verl
    from gtpo_verl.integrations.context import overlong
    from gtpo_verl.integrations.continuations import Prompts, bulk_servers

    penalty = overlong(config)
    facts = {
        "model": str(config.actor_rollout_ref.model.path),
        "command": shlex.join(["gtpo-verl", "audit", args.model, *args.overrides]),
        "created": now(),
        "versions": run_versions(),
        "hardware": hardware(),
        "settings": settings_as_in_training(config) | as_facts(plan),
        "overlong": penalty and list(astuple(penalty)),
        "step": int(config.data.train_batch_size),
        "chosen": args.gradient_params,
        "seed": int(config.seed),
        "seconds": 0.0,
    }
    bulk_servers(config)
    check_with_verl(config)
    prompts = Prompts(config)
    store = Store(output, facts, fresh=args.fresh)
    print(f"Audit: {output}", flush=True)
    _print_plan(plan, config, output, methods)
    started = time.monotonic()
    _sample(config, prompts, store, plan, wait=args.wait)
    if plan.gradients:
        _measure_gradients(config, prompts, store, plan, methods)
    store.facts["seconds"] += time.monotonic() - started
    return _report(store, plan, methods)


def _plan(args: argparse.Namespace) -> Plan:
    prompts = 2 * args.gradients or Plan.prompts
    return Plan(
        gradients=args.gradients,
        prompts=prompts if args.prompts is None else args.prompts,
        samples=Plan.samples if args.samples is None else args.samples,
        responses=args.responses,
        steps=args.steps,
        continuations=args.continuations,
        second_stage=args.second_stage,
        second_continuations=args.second_continuations,
        branches=args.branches,
    )


def _output(subject: Subject, plan: Plan) -> Path:
    kind = "-gradients" if plan.gradients else ""
    if subject.config_file is None:
        return Path("outputs") / f"audit-{Path(subject.path).name}{kind}"
    return subject.output.parent.parent / "audit" / f"{subject.output.name}{kind}"


def _methods(text: str, overrides: Sequence[str]) -> "list[Method]":
    from gtpo_verl.audit.methods import methods

    return methods([name.strip() for name in text.split(",") if name.strip()], overrides)


def _print_plan(plan: Plan, config: DictConfig, output: Path, methods: "list[Method]") -> None:
    """Print cost and power: for the lengths of an audit that has begun, else for the limit."""
    from gtpo_verl.audit.render import print_plan
    from gtpo_verl.audit.store import ROLLOUTS_FILE, Rollout, read_records

    known = read_records(output / ROLLOUTS_FILE, Rollout)
    lengths = [len(rollout.tokens) for rollout in known]
    length = sum(lengths) / len(lengths) if lengths else float(config.data.max_response_length)
    scored = sum(method.scored for method in methods)
    cached = bool(config.actor_rollout_ref.rollout.enable_prefix_caching)
    prompt = float(config.data.max_prompt_length)
    print_plan(plan, length, prompt, methods=scored, measured=bool(lengths), cached=cached)


def _sample(config: DictConfig, prompts: "Prompts", store: "Store", plan: Plan, *, wait: bool) -> None:
    """Sample what is not there yet, with a progress bar."""
    from gtpo_verl.audit.sampling import choose_responses, missing, sample_rollouts, sample_values
    from gtpo_verl.audit.store import LOG_FILE
    from gtpo_verl.integrations.continuations import Sampler, sampler

    seed = int(config.seed)
    if not missing(store, plan, len(prompts), seed):
        print("Everything was sampled before.")
        return
    with progress_over(store.directory / LOG_FILE) as progress:
        bars = {"": progress.add_task("starting Ray and vLLM", total=None)}

        def advance(what: str, done: int, total: int) -> None:
            if what not in bars:
                for other in bars.values():
                    progress.update(other, visible=False)
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        def describe(row: int, tokens: Sequence[int]) -> tuple[str, str, list[str]]:
            record = prompts.problems.record(row)
            return record.cluster or record.problem, prompts.text(prompts.tokens(row)), prompts.texts(tokens)

        try:
            with sampler(config, prompts, wait=wait) as work:
                assert isinstance(work, Sampler)

                def proceed(prefixes: "Iterable[Prefix]") -> "Iterator[tuple[Prefix, list[Continuation]]]":
                    return work.continued(prefixes)

                try:
                    sample_rollouts(store, plan, len(prompts), seed, proceed, describe, advance)
                    if not plan.gradients:
                        chosen = choose_responses(store.rollouts, plan, seed)
                        sample_values(store, chosen, plan, seed, proceed, advance)
                finally:
                    store.flush()
        except KeyboardInterrupt:
            progress.console.print(f"\nWhat is finished is in {store.directory}; repeat the command for the rest.")
            raise


def _reanalyse(args: argparse.Namespace) -> int:
    from gtpo_verl.audit.store import plan_of, reopen

    overrides = [*([args.model] if args.model else []), *args.overrides]
    store = reopen(args.reanalyse.resolve())
    return _report(store, plan_of(store), _methods(args.methods, overrides))


def _measure_gradients(
    config: DictConfig, prompts: "Prompts", store: "Store", plan: Plan, methods: "list[Method]"
) -> None:
    """Compute the gradients of all groups with contrast, and write their dot products."""
    from gtpo_verl.audit.backward import load_policy, measure, parts_of
    from gtpo_verl.audit.sampling import groups_with_contrast
    from gtpo_verl.audit.store import GRADIENTS_FILE, LOG_FILE
    from gtpo_verl.integrations.context import Overlong

    penalty = store.facts["overlong"]
    groups = groups_with_contrast(store.rollouts, plan)
    parts, number = parts_of(
        groups, plan.gradients, store.facts["step"], methods, penalty and Overlong(*penalty), store.facts["seed"]
    )
    with progress_over(store.directory / LOG_FILE) as progress:
        policy = load_policy(config, prompts.tokens, store.facts["chosen"])
        bars: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        products, difference = measure(policy, parts, number, advance)
    products.write(store.directory / GRADIENTS_FILE)
    store.facts |= {"parameters": policy.size, "log_prob_difference": difference}


def _report(store: "Store", plan: Plan, methods: "list[Method]") -> int:
    """Compute, write and print the results."""
    from gtpo_verl.audit.render import print_table
    from gtpo_verl.audit.sampling import strata_of

    strata = strata_of(store.rollouts, plan.prompts)
    facts = {"solved": len(strata.solved), "never": len(strata.never)}
    report = _report_gradients if plan.gradients else _report_values
    table, page = report(store, plan, methods, facts)
    print_table(table)
    samples = "rollouts.parquet" if plan.gradients else "values.parquet"
    print(f"Page:    {page}\nNumbers: {store.directory / 'audit.json'}\nSamples: {store.directory / samples}")
    return 0


def _report_values(store: "Store", plan: Plan, methods: "list[Method]", facts: dict[str, Any]) -> "tuple[Table, Path]":
    from gtpo_verl.audit.analysis import plain
    from gtpo_verl.audit.page import write_page
    from gtpo_verl.audit.render import values_table
    from gtpo_verl.audit.score import measurement, score
    from gtpo_verl.integrations.context import Overlong

    overlong = store.facts["overlong"]
    result = score(store, plan, store.facts["seed"], methods, None if overlong is None else Overlong(*overlong))
    facts = measurement(store, result) | facts
    store.record({"measurement": facts} | plain(result.analysis))
    table = values_table(result, plan, facts)
    return table, write_page(store, table, facts, responses=(result, plan))


def _report_gradients(
    store: "Store", plan: Plan, methods: "list[Method]", facts: dict[str, Any]
) -> "tuple[Table, Path]":
    from gtpo_verl.audit.gradients import Products, figures
    from gtpo_verl.audit.page import write_page
    from gtpo_verl.audit.render import gradients_table
    from gtpo_verl.audit.store import GRADIENTS_FILE

    products = Products.read(store.directory / GRADIENTS_FILE)
    found = figures(products, store.facts["step"])
    facts |= {
        "groups": int(products.audited.sum()),
        "others": int((~products.audited).sum()),
        "wanted": plan.gradients,
        "samples": plan.samples,
        "unscored": [method.name for method in methods if not method.scored],
    } | {name: store.facts[name] for name in ("step", "parameters", "chosen", "log_prob_difference")}
    store.record({"measurement": facts, "gradients": found})
    table = gradients_table(found, facts, plan)
    return table, write_page(store, table, facts, gradients=found)
