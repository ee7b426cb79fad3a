"""``gtpo-verl audit``: how well each method's credit agrees with the true advantage of every step."""

import argparse
import datetime as dt
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gtpo_verl.audit.plan import Plan
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.subject import Subject, configuration, find_subject
from gtpo_verl.files import local_path
from gtpo_verl.integrations.checks import check_model
from gtpo_verl.rules.data import check_data
from gtpo_verl.rules.stages import check_evaluation
from gtpo_verl.rules.start import check_output
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.runs.terminal import progress_over
from gtpo_verl.tasks.prepare import use_embedded_prompts

if TYPE_CHECKING:
    from gtpo_verl.audit.methods import Method
    from gtpo_verl.audit.store import Store
    from gtpo_verl.evaluation.continuations import Continuation, Prefix
    from gtpo_verl.integrations.continuations import Prompts

EPILOG = """\
MODEL is a run, a checkpoint or a model, as for gtpo-verl eval; prompts are those of data.val_files, sampled as the
training samples (actor_rollout_ref.rollout.temperature and so on).

examples:
  gtpo-verl audit outputs/gtpo-20260101-120000 --dry-run
  gtpo-verl audit outputs/gtpo-20260101-120000 --second-stage 12
  gtpo-verl audit Qwen/Qwen2.5-1.5B data.val_files=data/math-500.parquet trainer.n_gpus_per_node=8
  gtpo-verl audit --reanalyse outputs/gtpo-20260101-120000/audit/global_step_20 --methods gtpo,fork20,eapo

Ctrl-C keeps what is finished, and the same command goes on. docs/audit.md explains the figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    default = Plan()
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a run, a checkpoint or a model, see below")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as for gtpo-verl train")
    for name, what in {
        "prompts": "prompts with contrast, some of whose responses are correct and some wrong",
        "samples": "responses sampled to each",
        "responses": "responses audited, half of them wrong where there are enough",
        "steps": "steps of a response",
        "continuations": "continuations of each point",
        "second-stage": "responses that get more of them, for the picture",
        "second-continuations": "continuations of each of their points",
        "branches": "other steps sampled from each point, for the state oracle; 8 multiply the cost by five",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default: {value})")
    parser.add_argument("--methods", default="", metavar="A,B", help="presets of algo= to score (default: all)")
    parser.add_argument(
        "--output", type=local_path, metavar="DIR", help="default: RUN/audit/NAME, or outputs/audit-MODEL"
    )
    parser.add_argument("--dry-run", action="store_true", help="print cost and power, and stop")
    parser.add_argument("--fresh", action="store_true", help="discard an earlier audit in the output directory")
    parser.add_argument("--reanalyse", type=Path, metavar="DIR", help="compute the figures of an audit again")
    parser.add_argument("--before", action="store_true", help="of a run: the model that its training started from")
    parser.add_argument("--wait", action="store_true", help="on a Ray cluster, wait until there is room")


def run(args: argparse.Namespace) -> int:
    """Audit; returns the exit code."""
    if args.reanalyse is not None:
        return _reanalyse(args)
    if args.model is None:
        raise UserError("name what to audit: a run, a checkpoint or a model; or --reanalyse DIR.")
    plan = _plan(args)
    subject = find_subject(args.model, before=args.before)
    config = configuration(subject, args.overrides)
    check_evaluation(config, args.overrides)
    output = check_output(args.output or _output(subject))
    check_model(config)
    use_embedded_prompts(config)  # which takes minutes: what can be checked before is
    check_data(config, ("val_files",))
    methods = _methods(args.methods, args.overrides)
    if args.dry_run:
        _print_plan(plan, config, output)
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
        "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": run_versions(),
        "hardware": hardware(),
        "settings": settings_as_in_training(config) | as_facts(plan),
        "overlong": penalty and list(astuple(penalty)),
        "seed": int(config.seed),
        "seconds": 0.0,
    }
    bulk_servers(config)
    check_with_verl(config)
    prompts = Prompts(config)
    store = Store(output, facts, fresh=args.fresh)
    print(f"Audit: {output}", flush=True)
    _print_plan(plan, config, output)
    started = time.monotonic()
    _sample(config, prompts, store, plan, wait=args.wait)
    store.facts["seconds"] += time.monotonic() - started
    return _report(store, plan, methods)


def _plan(args: argparse.Namespace) -> Plan:
    return Plan(
        prompts=args.prompts,
        samples=args.samples,
        responses=args.responses,
        steps=args.steps,
        continuations=args.continuations,
        second_stage=args.second_stage,
        second_continuations=args.second_continuations,
        branches=args.branches,
    )


def _output(subject: Subject) -> Path:
    if subject.config_file is None:
        return Path("outputs") / f"audit-{Path(subject.path).name}"
    return subject.output.parent.parent / "audit" / subject.output.name


def _methods(text: str, overrides: Sequence[str]) -> "list[Method]":
    from gtpo_verl.audit.methods import methods

    return methods([name.strip() for name in text.split(",") if name.strip()], overrides)


def _print_plan(plan: Plan, config: DictConfig, output: Path) -> None:
    """Print cost and power: for the lengths of an audit that has begun, else for the limit."""
    from gtpo_verl.audit.render import print_plan
    from gtpo_verl.audit.store import ROLLOUTS_FILE, Rollout, read_records

    known = read_records(output / ROLLOUTS_FILE, Rollout)
    lengths = [len(rollout.tokens) for rollout in known]
    length = sum(lengths) / len(lengths) if lengths else float(config.data.max_response_length)
    cached = bool(config.actor_rollout_ref.rollout.enable_prefix_caching)
    print_plan(plan, length, float(config.data.max_prompt_length), measured=bool(lengths), cached=cached)


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

                sample_rollouts(store, plan, len(prompts), seed, proceed, describe, advance)
                chosen = choose_responses(store.rollouts, plan, seed)
                sample_values(store, chosen, plan, seed, proceed, advance)
        except KeyboardInterrupt:
            progress.console.print(f"\nWhat is finished is in {store.directory}; repeat the command for the rest.")
            raise


def _reanalyse(args: argparse.Namespace) -> int:
    from gtpo_verl.audit.store import plan_of, reopen

    overrides = [*([args.model] if args.model else []), *args.overrides]
    store = reopen(args.reanalyse.resolve())
    return _report(store, plan_of(store), _methods(args.methods, overrides))


def _report(store: "Store", plan: Plan, methods: "list[Method]") -> int:
    """Compute, write and print the results."""
    from gtpo_verl.audit.analysis import plain
    from gtpo_verl.audit.page import write_page
    from gtpo_verl.audit.render import print_result
    from gtpo_verl.audit.sampling import strata_of
    from gtpo_verl.audit.score import measurement, score
    from gtpo_verl.integrations.context import Overlong

    overlong = store.facts["overlong"]
    result = score(store, plan, store.facts["seed"], methods, None if overlong is None else Overlong(*overlong))
    strata = strata_of(store.rollouts, plan.prompts)
    facts = measurement(store, result) | {"solved": len(strata.solved), "never": len(strata.never)}
    store.record({"measurement": facts} | plain(result.analysis))
    page = write_page(store, plan, result, facts)
    print_result(result, plan, facts)
    print(f"Page:    {page}\nNumbers: {store.directory / 'audit.json'}\nSamples: {store.directory / 'values.parquet'}")
    return 0
