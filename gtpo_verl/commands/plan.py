"""``gtpo-verl plan``: batch arithmetic, memory and time of a configuration, without a GPU."""

import argparse
import json
import sys

from gtpo_verl.commands.options import declare, overrides_of, share_gpu
from gtpo_verl.config import compose_config, prepare
from gtpo_verl.errors import UserError
from gtpo_verl.problems import errors_of, refuse

EPILOG = """\
examples:
  gtpo-verl plan setting=paper_gtpo_32b backend=megatron algo=gtpo     the paper's 32B run on 64 GPUs
  gtpo-verl plan setting=small_gpu --yield 0.3 --response-length 900   what you know about your model and data
  gtpo-verl plan setting=paper_gtpo_7b --measured outputs/gtpo-1       lengths, yield and speeds of a run of any size
  gtpo-verl plan setting=small_gpu --gpu a100-40gb --json              output for programs

The overrides are those of `gtpo-verl train`: what is planned is what would run, on GPUs unless hardware=cpu is given.
No GPU, download or data is needed; the shapes of Qwen2.5 ship with the package, those of other dense models are read
from their directory or the hub's cache. Numbers under "Assumptions" are not in the configuration: --assume NAME=VALUE
replaces one. A measured run of another model lends its tokens per second by the ratio of the parameters.
The exit code is 1 if the run would fail.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, "overrides", "--config-dir")
    share_gpu(parser)
    declare(
        parser,
        ("--gpu-memory GIB", float, "memory per GPU, instead of the data sheet's"),
        ("--yield SHARE", float, "share of groups that dynamic sampling keeps"),
        ("--prompt-length TOKENS", float, "mean tokens of a prompt"),
        ("--response-length TOKENS", float, "mean tokens of a response"),
        ("--assume NAME=VALUE", list, "replace any assumption that the plan prints"),
        ("--json", False, "print JSON instead of tables"),
    )


def run(args: argparse.Namespace) -> int:
    """Print a plan; returns 1 if the run would fail, else 0."""
    from gtpo_verl.planning.plan import make_plan
    from gtpo_verl.planning.render import show
    from gtpo_verl.rules.plan import plannable, problems
    from gtpo_verl.rules.stages import problems as problems_of

    overrides = overrides_of(args)
    config = compose_config(overrides)
    prepare(config, overrides)
    if not plannable(config):
        refuse(problems_of(config, overrides))
    plan = make_plan(config, gpu=args.gpu, given=_given(args), measured=args.measured)
    found = problems(config, plan, overrides)
    if args.json:
        listed = [{"level": problem.severity, "message": problem.message} for problem in found]
        json.dump({"overrides": overrides, **plan.to_dict(), "findings": listed}, sys.stdout, indent=2)
        print()
    else:
        show(plan, found)
    return 1 if errors_of(found) else 0


def _given(args: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in args.assume:
        name, _, text = item.partition("=")
        try:
            found[name] = float(text)
        except ValueError as error:
            raise UserError(f"--assume {item}: write NAME=NUMBER.") from error
    for option in ("gpu_memory", "yield", "prompt_length", "response_length"):
        if (value := getattr(args, option)) is not None:
            found["sampling_yield" if option == "yield" else option] = value
    return found
