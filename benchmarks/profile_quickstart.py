"""Where the CPU time of a quickstart arm goes, process by process, with verl's agent loop worker and with ours.

One arm is trained twice, with `AgentLoopManagerTQ` of verl and with this project's manager. The CPU seconds of every
process are read while it lives; py-spy (`pip install py-spy`) samples the processes and draws a flame graph of each.

    python benchmarks/profile_quickstart.py

Takes ten minutes on two cores and writes `quickstart-cpu.json`, `quickstart-cpu.md` and `flames/WORKER-PROCESS.svg`
into benchmarks/results. py-spy reads a process while it runs, without stopping it.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

RESULTS = Path(__file__).parent / "results"
VERL = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ"
ARMS: dict[str, list[str]] = {"ours": [], "verl": [VERL]}
# how the processes call themselves, in the order of the table
PROCESSES = {
    "AgentLoopWorkerTQ": "agent loop",
    "GroupAgentLoopWorker": "agent loop",
    "VLLM::EngineCore": "vLLM's engine",
    "EntropyVLLMHttpServer": "vLLM's server",
    "WorkerDict": "FSDP worker",
    "TaskRunner": "task runner",
    "RewardLoopWorker": "reward worker",
    "GroupRewardLoopWorker": "reward worker",
    "GlobalRequestLoadBalancer": "load balancer",
    "TransferQueueController": "TransferQueue's controller",
    "SimpleStorageUnit": "TransferQueue's storage",
}
LABELS = tuple(dict.fromkeys(PROCESSES.values()))
RATE = 40  # samples a second


def name_of(process: psutil.Process) -> str:
    line = process.cmdline()
    return line[0].removeprefix("ray::").split(".")[0].split("(")[0] if line else ""


def watch(arm: str, command: list[str], flames: Path | None) -> tuple[Counter[str], float]:
    """Run a command; the CPU seconds of its processes by label, those without one as `other`, and its duration."""
    seconds: dict[tuple[int, float], tuple[str, float]] = {}
    samplers: dict[str, subprocess.Popen[bytes]] = {}
    started = time.monotonic()
    root = subprocess.Popen(command)
    while root.poll() is None:
        for process in psutil.Process(root.pid).children(recursive=True):
            try:
                label = PROCESSES.get(name_of(process), "other")
                times = process.cpu_times()
                identity = (process.pid, process.create_time())
            except psutil.Error:
                continue
            seconds[identity] = (label, times.user + times.system)
            if flames and label != "other" and label not in samplers:
                samplers[label] = sampler(process.pid, flames / f"{arm}-{slug(label)}.svg")
        time.sleep(0.5)
    for each in samplers.values():
        each.wait(60)
    total: Counter[str] = Counter()
    for label, spent in seconds.values():
        total[label] += spent
    if root.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return total, time.monotonic() - started


def sampler(pid: int, file: Path) -> "subprocess.Popen[bytes]":
    options = ["--rate", str(RATE), "--duration", "unlimited", "--format", "flamegraph", "--nonblocking"]
    return subprocess.Popen(
        [str(py_spy()), "record", "--pid", str(pid), "--output", str(file), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def py_spy() -> Path:
    found = shutil.which("py-spy") or Path(sys.executable).with_name("py-spy")
    if not Path(found).exists():
        raise SystemExit("py-spy is missing: python -m pip install py-spy, or --no-flames")
    return Path(found)


def slug(label: str) -> str:
    return label.lower().replace("'s", "").replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="steps of an arm (default: %(default)s)")
    parser.add_argument("--no-flames", action="store_true", help="count only, without py-spy")
    options = parser.parse_args()
    flames = None if options.no_flames else RESULTS / "flames"
    if flames:
        flames.mkdir(parents=True, exist_ok=True)
        py_spy()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm, overrides in ARMS.items():
            command = [sys.executable, "-m", "gtpo_verl.cli", "quickstart", "--output", folder, "--arms", "gtpo"]
            spent, duration = watch(arm, [*command, "--steps", str(options.steps), "--fresh", *overrides], flames)
            found[arm] = {label: round(spent[label], 1) for label in (*LABELS, "other")} | {"wall": round(duration, 1)}
            print(arm, found[arm], flush=True)
    write(found, options.steps)


def write(found: dict[str, dict[str, float]], steps: int) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    (RESULTS / "quickstart-cpu.json").write_text(
        json.dumps({"steps": steps, "machine": machine, **found}, indent=1) + "\n"
    )
    lines = ["| CPU seconds | verl's worker | ours |", "|---|---|---|"]
    lines += [f"| {label} | {found['verl'][label]:.0f} | {found['ours'][label]:.0f} |" for label in (*LABELS, "other")]
    (RESULTS / "quickstart-cpu.md").write_text(
        f"One quickstart arm of {steps} steps, {machine} (`benchmarks/profile_quickstart.py`): CPU seconds of its\n"
        "processes. `other` is Ray itself, the command and what starts and ends early. Flame graphs: `flames/`.\n\n"
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
