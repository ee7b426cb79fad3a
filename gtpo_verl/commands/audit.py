"""``gtpo-verl audit``: how well each method's credit agrees with true advantages, or its gradient with the true one."""

import argparse
import math
import re
import time
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from gtpo_verl.audit import sampling
from gtpo_verl.audit.methods import Method, methods
from gtpo_verl.audit.plan import BYTES_OF_A_CREDIT, PROCESS, Plan, bytes_for_gradients, bytes_of_a_pass
from gtpo_verl.audit.store import (
    GRADIENTS_FILE,
    LOG_FILE,
    ROLLOUTS_FILE,
    Rollout,
    Store,
    as_facts,
    plan_of,
    read_records,
    reopen,
)
from gtpo_verl.commands.options import declare, overrides_of
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.settings import facts_of, settings_as_in_training
from gtpo_verl.evaluation.subject import Subject, configuration, find_subject
from gtpo_verl.integrations.context import Overlong, overlong
from gtpo_verl.integrations.launch import export_environment
from gtpo_verl.integrations.weights import model_directory, tensor_shapes
from gtpo_verl.planning.memory import FP32, GIB, machine_memory
from gtpo_verl.planning.shapes import load_shape
from gtpo_verl.rules.stages import check_evaluation
from gtpo_verl.rules.start import check_output
from gtpo_verl.runs.lock import LOCK_FILE, results_lock
from gtpo_verl.runs.terminal import progress_over

if TYPE_CHECKING:  # imports verl
    from gtpo_verl.integrations.continuations import Prompts

EPILOG = """\
MODEL is a run, a checkpoint or a model, as for gtpo-verl eval; prompts are those of data.val_files, sampled as the
training samples (actor_rollout_ref.rollout.temperature and so on).

examples:
  gtpo-verl audit outputs/gtpo-seed0-20260101-120000 --check
  gtpo-verl audit outputs/gtpo-seed0-20260101-120000 --second-stage 12
  gtpo-verl audit Qwen/Qwen2.5-1.5B verifier=boxed data.val_files=data/math-500.parquet trainer.n_gpus_per_node=8
  gtpo-verl audit outputs/gtpo-seed0-20260101-120000 --gradients 192 --methods dapo,gtpo data.val_files=P.parquet
  gtpo-verl audit --reanalyse outputs/gtpo-seed0-20260101-120000/audit/global_step_20 --methods gtpo,fork20,eapo

Ctrl-C keeps what is finished, and the same command goes on. docs/guides/audit.md explains the figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a run, a checkpoint or a model, see below")
    declare(
        parser,
        "overrides",
        "--config-dir",
        ("--prompts P", int, "with correct and wrong responses (default: 64, or 2 N with --gradients N)"),
        ("--samples P", int, "responses sampled to each (default: 8, or a training's with --gradients N)"),
        ("--responses N", Plan.responses, "responses audited, half of them wrong where there are enough"),
        ("--steps N", Plan.steps, "steps of a response, a token or more each"),
        ("--continuations N", Plan.continuations, "continuations of each point"),
        ("--second-stage N", Plan.second_stage, "responses that get more of them, for the picture"),
        ("--second-continuations N", Plan.second_continuations, "continuations of each of their points"),
        ("--branches N", Plan.branches, "other steps from each point, for the state oracle; 8 cost five times as much"),
        ("--gradients N", 0, "instead of all above, signal and noise of each method's gradient from N groups"),
        ("--gradient-params REGEX", _regular_expression, "of parameters with such a name alone (default: all)"),
        ("--methods A,B", str, "presets of algo= to score (default: all)"),
        ("--output", "default: RUN/audit/NAME, or outputs/audit-MODEL"),
        "--fresh",
        ("--check", "print cost and power, and stop"),
        ("--reanalyse DIR", Path, "compute the figures of an audit again"),
        "--before",
        "--wait",
    )
    parser.set_defaults(gradient_params="", methods="")


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def run(args: argparse.Namespace) -> int:
    """Audit; returns the exit code."""
    overrides = overrides_of(args)
    if args.reanalyse is not None:
        overrides = [*([args.model] if args.model else []), *overrides]
        store = reopen(args.reanalyse.resolve())
        plan = plan_of(store)
        if plan.gradients and (args.methods or overrides):
            raise UserError("gradients are of the methods that were measured: leave out --methods and overrides.")
        return _report(store, plan, _methods(args.methods, overrides))
    if args.model is None:
        raise UserError("name what to audit: a run, a checkpoint or a model; or --reanalyse DIR.")
    given = {field.name: getattr(args, field.name) for field in fields(Plan)}
    given = {name: number for name, number in given.items() if number is not None}
    plan = Plan(**({"prompts": 2 * args.gradients} if args.gradients else {}) | given)
    chosen = _methods(args.methods, overrides)
    subject = find_subject(args.model, before=args.before)
    config = configuration(subject, overrides)
    if plan.gradients and args.samples is None:
        plan = replace(plan, samples=int(config.actor_rollout_ref.rollout.n))
    output = check_output(args.output or _output(subject, plan))
    check_evaluation(config, overrides)
    if plan.gradients:
        _check_memory(config, chosen, args.gradient_params, plan.samples)
    export_environment(config)
    from gtpo_verl.integrations.checks import check_with_verl
    from gtpo_verl.integrations.continuations import Prompts, bulk_servers

    check_with_verl(config)
    if args.check:
        bulk_servers(config)
        _print_plan(plan, config, output, chosen)
        return 0
    penalty = overlong(config)
    settings = settings_as_in_training(config) | as_facts(plan)
    facts = facts_of(config, settings) | {
        "overlong": penalty and list(astuple(penalty)),
        "step": int(config.data.train_batch_size),
        "chosen": args.gradient_params,
        "seed": int(config.seed),
        "seconds": 0.0,
    }
    bulk_servers(config)
    prompts = Prompts(config)
    with results_lock(output / LOCK_FILE):
        store = Store(output, facts, fresh=args.fresh)
        print(f"Audit: {output}", flush=True)
        _print_plan(plan, config, output, chosen)
        started = time.monotonic()
        _sample(config, prompts, store, plan, wait=args.wait)
        if plan.gradients:
            _measure_gradients(config, prompts, store, plan, chosen)
        store.facts["seconds"] += time.monotonic() - started
        return _report(store, plan, chosen)


def _output(subject: Subject, plan: Plan) -> Path:
    kind = "-gradients" if plan.gradients else ""
    if subject.config_file is None:
        return Path("outputs") / f"audit-{Path(subject.path).name}{kind}"
    return subject.output.parent.parent / "audit" / f"{subject.output.name}{kind}"


def _methods(text: str, overrides: Sequence[str]) -> list[Method]:
    return methods([name.strip() for name in text.split(",") if name.strip()], overrides)


def _check_memory(
    config: DictConfig,
    chosen: Sequence[Method],
    pattern: str,
    samples: int,
    longest: tuple[int, int] | None = None,
) -> None:
    """Raise UserError where weights and gradients do not fit into one device, with a pass over the `longest` prompt and
    response that were sampled; before any is, warn where they would not with those of the limits.
    """
    import torch

    directory = model_directory(str(config.actor_rollout_ref.model.path))
    sizes = {name: math.prod(shape) for name, shape in (tensor_shapes(directory) if directory else {}).items()}
    scored = sum(method.scored for method in chosen)
    differentiated = sum(size for name, size in sizes.items() if re.search(pattern, name))
    needed = FP32 * sum(sizes.values()) + bytes_for_gradients(scored) * differentiated + PROCESS
    if torch.cuda.is_available():  # where `load_policy` puts the model
        there = float(torch.cuda.get_device_properties(0).total_memory)
    else:
        there, _ = machine_memory()
    if needed > there:
        raise UserError(
            f"--gradients: weights in float32 and the gradients of {scored + 1} credits take {needed / GIB:,.0f} GiB, "
            f"and the device has {there / GIB:,.0f}: name fewer --methods (each takes {BYTES_OF_A_CREDIT} bytes a "
            "parameter) or fewer parameters by --gradient-params."
        )
    try:
        shape = load_shape(str(config.actor_rollout_ref.model.path))
    except UserError:  # of a kind whose activations are not known
        return
    prompt, response = longest or (int(config.data.max_prompt_length), int(config.data.max_response_length))
    activations = bytes_of_a_pass(shape, samples, prompt, response)
    if needed + activations > there:
        text = (
            f"a prompt of {prompt:,} tokens with a response of {response:,} takes about {activations / GIB:,.0f} GiB, "
            f"beside {needed / GIB:,.0f} of weights and gradients, and the device has {there / GIB:,.0f}: "
            "lower data.max_response_length, or name fewer --methods"
        )
        if longest and not pattern:  # with some parameters alone it takes less
            raise UserError(f"--gradients: {text}.")
        print(f"warning: where responses reach their limit, {text}.")


def _print_plan(plan: Plan, config: DictConfig, output: Path, chosen: Sequence[Method]) -> None:
    """Print cost and power: for the lengths of an audit that has begun, else for the limit."""
    from gtpo_verl.audit.render import print_plan

    lengths = [len(rollout.tokens) for rollout in read_records(output / ROLLOUTS_FILE, Rollout)]
    length = sum(lengths) / len(lengths) if lengths else float(config.data.max_response_length)
    scored = sum(method.scored for method in chosen)
    cached = bool(config.actor_rollout_ref.rollout.enable_prefix_caching)
    prompt = float(config.data.max_prompt_length)
    print_plan(plan, length, prompt, methods=scored, measured=bool(lengths), cached=cached)


def _sample(config: DictConfig, prompts: "Prompts", store: Store, plan: Plan, *, wait: bool) -> None:
    """Sample what is not there yet, with a progress bar."""
    from gtpo_verl.integrations.continuations import sampler

    seed = int(config.seed)
    if not sampling.missing(store, plan, len(prompts), seed):
        print("Everything was sampled before.")
        return
    with progress_over(store.directory / LOG_FILE, store.directory) as progress:
        bars = {"": progress.add_task("starting Ray and vLLM", total=None)}

        def advance(what: str, done: int, total: int) -> None:
            if what not in bars:
                for other in bars.values():
                    progress.update(other, visible=False)
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done, total=total)

        def describe(row: int, tokens: Sequence[int]) -> tuple[str, str, list[str]]:
            record = prompts.record(row)
            return record.cluster or record.problem, prompts.text(prompts.tokens(row)), prompts.texts(tokens)

        try:
            with sampler(config, prompts, wait=wait) as work:
                sampling.sample_rollouts(store, plan, len(prompts), seed, work.continued, describe, advance)
                if not plan.gradients:
                    responses = sampling.choose_responses(store.rollouts, plan, seed)
                    sampling.sample_values(store, responses, plan, seed, work.continued, advance)
        finally:
            store.flush()


def _measure_gradients(
    config: DictConfig, prompts: "Prompts", store: Store, plan: Plan, chosen: Sequence[Method]
) -> None:
    """Compute the gradients of all groups with contrast, and write their dot products."""
    from gtpo_verl.audit.backward import load_policy, measure, parts_of

    facts = store.facts
    groups = sampling.groups_with_contrast(store.rollouts, plan)
    lengths = ((len(prompts.tokens(each.row)), len(each.tokens)) for group in groups for each in group)
    longest = max(lengths, key=sum)
    _check_memory(config, chosen, facts["chosen"], plan.samples, longest)
    parts, number = parts_of(groups, plan.gradients, facts["step"], chosen, _penalty(store), facts["seed"])
    with progress_over(store.directory / LOG_FILE, store.directory) as progress:
        policy = load_policy(config, prompts.tokens, facts["chosen"])
        bars: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        products, difference = measure(policy, parts, number, advance)
    products.write(store.directory / GRADIENTS_FILE)
    facts |= {"parameters": policy.size, "log_prob_difference": difference}


def _penalty(store: Store) -> Overlong | None:
    return Overlong(*store.facts["overlong"]) if store.facts["overlong"] else None


def _report(store: Store, plan: Plan, chosen: Sequence[Method]) -> int:
    """Compute, write and print the results."""
    from gtpo_verl.audit.gradients import Products, figures
    from gtpo_verl.audit.page import write_page
    from gtpo_verl.audit.render import gradients_table, print_table, values_table
    from gtpo_verl.audit.score import measurement, score

    strata = sampling.strata_of(store.rollouts, plan.prompts)
    facts: dict[str, Any] = {"solved": len(strata.solved), "never": len(strata.never)}
    if plan.gradients:
        products = Products.read(store.directory / GRADIENTS_FILE)
        found = figures(products, store.facts["step"])
        facts |= {
            "groups": int(products.audited.sum()),
            "others": int((~products.audited).sum()),
            "wanted": plan.gradients,
            "samples": plan.samples,
            "unscored": (store.facts.get("measurement") or {}).get(
                "unscored", [method.name for method in chosen if not method.scored]
            ),
        } | {name: store.facts[name] for name in ("step", "parameters", "chosen", "log_prob_difference")}
        store.record({"measurement": facts, "gradients": found})
        table = gradients_table(found, facts, plan)
        page, samples = write_page(store, table, facts, gradients=found), "rollouts.parquet"
    else:
        result = score(store, plan, store.facts["seed"], chosen, _penalty(store))
        facts = measurement(store, result) | facts
        store.record({"measurement": facts, **vars(result.analysis)})
        table = values_table(result, plan, facts)
        page, samples = write_page(store, table, facts, responses=(result, plan)), "values.parquet"
    print_table(table)
    print(f"Page:    {page}\nNumbers: {store.directory / 'audit.json'}\nSamples: {store.directory / samples}")
    return 0
