"""CPU time of a response in the agent loops: verl's worker and ours, on the same prompts and the same servers.

TransferQueue, load balancer and reward worker are the real ones. `instant` is a server that answers at once, so that
the loop alone is seen; `vllm` is vLLM on a CPU with a tiny model. Rounds of the two workers alternate; what is counted
is the CPU time of the processes, which other jobs on the machine affect little. The prompts are those of the embedded
task, the loops those that pass rollout entropies on.

    python benchmarks/bench_agent_loop.py

Takes about ten minutes and writes `agent-loop-cpu.json` and `.md` into benchmarks/results.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.agent_loops import GroupAgentLoopManager
from gtpo_verl.integrations.reward_loop import GroupRewardLoopManager
from gtpo_verl.integrations.standalone import standalone
from gtpo_verl.integrations.vllm.names import ENTROPIES, VERSIONS
from gtpo_verl.integrations.vllm.wiring import enable_rollout_entropy
from gtpo_verl.tasks import task as embedded_task
from gtpo_verl.tasks.model import build_model, build_tokenizer, save
from gtpo_verl.tasks.prepare import rows
from gtpo_verl.tasks.sums import demonstrations

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "agent-loop-cpu.json"
MANAGERS: dict[str, Any] = {"verl": AgentLoopManagerTQ, "ours": GroupAgentLoopManager}
AGENT_LOOPS = {"verl": "AgentLoopWorkerTQ", "ours": "GroupAgentLoopWorker"}  # as Ray calls their processes
POLL = 0.25  # seconds
SAMPLES = 8  # responses of a group
GOAL = 0.35  # of verl's CPU time of a response in the agent loop
STEP, WORKERS = 8192, 8  # a step of the paper's size: 512 prompts of 16 responses
Cell = tuple[str, int, int, int]  # server, tokens of a response, prompts of a round, rounds
CELLS: tuple[Cell, ...] = (("instant", 32, 32, 5), ("instant", 4096, 16, 15), ("vllm", 32, 32, 4), ("vllm", 4096, 2, 3))
# how Ray calls the other processes, in the order of the table
PROCESSES = {
    "GroupRewardLoopWorker": "reward worker",
    "GlobalRequestLoadBalancer": "load balancer",
    "TransferQueueController": "TransferQueue's controller",
    "SimpleStorageUnit": "TransferQueue's storage",
    "InstantServer": "server",
    "EntropyVLLMHttpServer": "server",
    "VLLM::EngineCore": "engine",
}
# idle: the worker whose turn it is not, whose process has as many threads that wait
AGENT_LOOP, IDLE = "agent loop", "idle agent loop"
LABELS = tuple(dict.fromkeys((AGENT_LOOP, *PROCESSES.values(), IDLE)))


@ray.remote
class InstantServer:
    """Answers every request at once with the same tokens, and the columns that a server of ours adds to them."""

    def __init__(self, tokens: int) -> None:
        drawn = np.random.default_rng(0)
        self.tokens = drawn.integers(2, 258, tokens).tolist()
        self.log_probs = drawn.normal(size=tokens).tolist()
        self.entropies = drawn.random(tokens, dtype=np.float32)

    async def generate(self, **request: Any) -> TokenOutput:
        extra = {ENTROPIES: self.entropies, VERSIONS: np.zeros(len(self.tokens), np.int32), "global_steps": 0}
        return TokenOutput(token_ids=self.tokens, log_probs=self.log_probs, stop_reason="completed", extra_fields=extra)


def configuration(model: Path, tokens: int) -> DictConfig:
    """The quickstart's configuration, for servers without a trainer."""
    config = compose_config(
        [
            "algo=gtpo",
            "setting=quickstart",
            "hardware=cpu",
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={model}",
            f"data.val_files={model}",
            "data.max_prompt_length=64",
            f"data.max_response_length={tokens}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"actor_rollout_ref.rollout.max_model_len={64 + tokens}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "reward.custom_reward_function.path=pkg://gtpo_verl.tasks.sums.reward",
            "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
            f"trainer.run_dir={model}",
        ]
    )
    standalone(config)
    config.actor_rollout_ref.rollout.calculate_log_probs = True
    return config


@contextmanager
def cluster(config: DictConfig) -> Iterator[None]:
    """Ray and TransferQueue for a block."""
    options: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    merged = OmegaConf.merge(environment, options.get("runtime_env") or {})
    ray.init(**(options | {"runtime_env": OmegaConf.to_container(merged), "log_to_driver": False}))
    try:
        tq.init(config.transfer_queue)
        yield
    finally:
        tq.close()
        ray.shutdown()


def client(config: DictConfig, server: str, tokens: int) -> LLMServerClient:
    """A client of the servers of a cell."""
    if server == "vllm":
        manager: Any = LLMServerManager.create(config=config)
        found: LLMServerClient = manager.get_client()
        return found
    servers = {"instant": InstantServer.options(max_concurrency=1000).remote(tokens)}  # type: ignore[attr-defined]
    return LLMServerClient(config, get_router_handle(servers, None, False, None))


def cpu_seconds() -> Counter[str]:
    """CPU seconds so far of every process of the cluster, by what it is."""
    seconds: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.cmdline()[0].removeprefix("ray::").split(".")[0]
            times = process.cpu_times()
        except (psutil.Error, IndexError):
            continue
        if name in PROCESSES or name in AGENT_LOOPS.values():
            seconds[name] += times.user + times.system
    return seconds


def column(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def prompts(count: int, number: int) -> Any:
    """A batch of prompts for verl's agent loops; their uids begin with the number of the round."""
    problems = demonstrations.PROBLEMS[number * count : (number + 1) * count]
    data = rows(embedded_task("sums"), problems, "train")
    columns = {name: column([row[name] for row in data]) for name in ("data_source", "reward_model", "extra_info")}
    columns |= {
        "raw_prompt": column([row["prompt"] for row in data]),
        "uid": column([f"round{number}prompt{i}" for i in range(count)]),
        "index": column(list(range(count))),
    }
    batch = tensordict_utils.get_tensordict(columns)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 1)
    tensordict_utils.assign_non_tensor_data(batch, "validate", False)
    return batch


def run_round(agents: Any, count: int, number: int) -> None:
    """Generate and score the responses of a round; they leave TransferQueue at its end."""
    agents.generate_sequences(prompts(count, number))
    while True:
        tags = tq.kv_list(partition_id="train").get("train", {})
        ended = [tag for tag in tags.values() if tag.get("status") in ("finished", "failure")]
        if len(ended) == count:
            break
        time.sleep(POLL)
    assert all(tag["status"] == "finished" for tag in ended)
    assert sum(tag["status"] == "success" for tag in tags.values()) == count * SAMPLES
    tq.kv_clear(keys=list(tags), partition_id="train")


def measure(server: str, tokens: int, count: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of CPU a response, by worker and process, for each round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MANAGERS}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer()
        save(build_model(len(tokenizer), 0, max_position_embeddings=64 + tokens), tokenizer, Path(folder))
        config = configuration(Path(folder), tokens)
        with cluster(config):
            enable_rollout_entropy(config)
            OmegaConf.resolve(config)  # as the trainer's process does
            reward = GroupRewardLoopManager(config=config)
            llm_client = client(config, server, tokens)
            agents = {
                name: manager.create(
                    config=config, llm_client=llm_client, reward_loop_worker_handles=reward.reward_loop_worker_handles
                )
                for name, manager in MANAGERS.items()
            }
            for number in range(-len(agents), rounds * len(agents)):  # the first round of each is not counted
                name = list(agents)[number % len(agents)]
                before = cpu_seconds()
                run_round(agents[name], count, number + len(agents))
                spent = cpu_seconds() - before
                if number >= 0:
                    found[name].append(milliseconds(spent, name, count * SAMPLES))
                    print(server, tokens, name, {k: round(v, 2) for k, v in found[name][-1].items()}, flush=True)
    return found


def milliseconds(spent: Counter[str], worker: str, responses: int) -> dict[str, float]:
    """A response's share of what each process spent in a round of a worker, in the order of the table."""
    agent_loops = {name: AGENT_LOOP if each == worker else IDLE for each, name in AGENT_LOOPS.items()}
    by_label: Counter[str] = Counter()
    for name, seconds in spent.items():
        by_label[(PROCESSES | agent_loops)[name]] += seconds * 1e3 / responses
    return {label: by_label[label] for label in LABELS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=["instant", "vllm"], help="measure with this server only")
    parser.add_argument("--tokens", type=int, help="measure responses of so many tokens only")
    parser.add_argument("--rounds", type=int, help="rounds of each worker (default: 3 to 15)")
    options = parser.parse_args()
    os.environ["VERL_PLATFORM"] = "cpu"
    results = {(each["server"], each["tokens"]): each for each in kept()}
    for server, tokens, count, rounds in CELLS:
        if options.server in (None, server) and options.tokens in (None, tokens):
            cell = (server, tokens, count, options.rounds or rounds)
            results[server, tokens] = summary(cell, measure(*cell))
            write([results[cell[:2]] for cell in CELLS if cell[:2] in results])


def kept() -> list[dict[str, Any]]:
    """Cells of an earlier run, which a run of some cells leaves as they are."""
    cells: list[dict[str, Any]] = json.loads(FILE.read_text())["cells"] if FILE.exists() else []
    return cells


def summary(cell: Cell, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and ours over verl's in the agent loop, pair of rounds by pair."""
    server, tokens, prompts_of_round, _ = cell
    pairs = list(zip(found["ours"], found["verl"], strict=True))
    medians = {
        worker: {label: statistics.median(each[label] for each in rounds) for label in LABELS}
        for worker, rounds in found.items()
    }
    return {
        "server": server,
        "tokens": tokens,
        "responses": prompts_of_round * SAMPLES,
        "ms": medians,
        "per_core_second": {worker: 1e3 / each[AGENT_LOOP] for worker, each in medians.items()},
        "ratio": statistics.median(ours[AGENT_LOOP] / verls[AGENT_LOOP] for ours, verls in pairs),
        "ratio_without_idle": statistics.median(busy(ours) / busy(verls) for ours, verls in pairs),
        "rounds": found,
    }


def busy(spent: dict[str, float]) -> float:
    """What the agent loop spent beyond what the idle one did, whose threads wait as well."""
    return spent[AGENT_LOOP] - spent[IDLE]


def write(results: list[dict[str, Any]]) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Ray {ray.__version__}"
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine, "goal": GOAL, "samples": SAMPLES, "cells": results}
    FILE.write_text(json.dumps(rounded(content), indent=1) + "\n")
    lines = ["| server | tokens | worker | responses a second and core | " + " | ".join(LABELS) + " |"]
    lines.append("|---" * (4 + len(LABELS)) + "|")
    for each in results:
        for worker, medians in each["ms"].items():
            lines.append(
                f"| {each['server']} | {each['tokens']} | {worker} | {each['per_core_second'][worker]:.0f} | "
                + " | ".join(f"{medians[label]:.2f}" for label in LABELS)
                + " |"
            )
    ratios, without_idle = (
        ", ".join(f"{each[name]:.2f} ({each['server']}, {each['tokens']} tokens)" for each in results)
        for name in ("ratio", "ratio_without_idle")
    )
    text = f"""CPU time of a response in ms, by process: verl's agent loop worker and ours, groups of {SAMPLES},
medians of alternating rounds (`benchmarks/bench_agent_loop.py`; {machine}).

The agent loop's, ours over verl's: {ratios}. Goal: at most {GOAL}.
After subtracting what the worker used in the same rounds whose turn it was not ("idle agent loop"): {without_idle}.

"""
    (RESULTS / "agent-loop-cpu.md").write_text(text + "\n".join(lines) + "\n" + on_paper(results))
    print(text + "\n".join(lines))


def on_paper(results: list[dict[str, Any]]) -> str:
    """What a step of the paper's size costs at these figures."""
    lines = [
        f"\nOn paper, a step of {STEP:,} responses and {WORKERS} workers: CPU seconds of all agent loops.\n",
        "| server | tokens | verl | ours | saved | saved by each worker |",
        "|---|---|---|---|---|---|",
    ]
    for each in results:
        verls, ours = (each["ms"][worker][AGENT_LOOP] * STEP / 1e3 for worker in ("verl", "ours"))
        saved = verls - ours
        lines.append(
            f"| {each['server']} | {each['tokens']} | {verls:.0f} | {ours:.0f} | {saved:.0f} | {saved / WORKERS:.1f} |"
        )
    return "\n".join(lines) + "\n"


def rounded(value: Any) -> Any:
    """Floats to three decimals, recursively."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
