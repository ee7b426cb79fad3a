"""verl's own rollout side, alone, on one CPU: replica, server, clients, agent loops and TransferQueue; no trainer.

``python drive_verl.py request.json answer.json``; the request names ``model`` and ``other_weights``, two directories of
one shape, how many responses to interrupt (``interrupted``) and their ``max_tokens``, and whether that is the ``only``
part wanted. The answer holds what every client and every column of TransferQueue held, and what failures said.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from run_engine import runner_of


def of_workers(server: Any, function: Callable[[Any], Any]) -> list[Any]:
    """What a function says of every worker; verl's own collective_rpc of a server returns nothing."""

    def ask(self: Any) -> list[Any]:  # not in the thread of the server's event loop
        loop = self.engine.output_handler.get_loop()
        return asyncio.run_coroutine_threadsafe(self.engine.collective_rpc(function), loop).result(60)

    return ray.get(server.__ray_call__.remote(ask))


def process_of(worker: Any) -> int:
    return os.getpid()


def socket_of(worker: Any) -> str:
    return worker._get_zmq_handle()


def compose(model: str) -> DictConfig:
    import verl

    settings = [
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        "+actor_rollout_ref.rollout.enable_sleep_mode=false",
        "actor_rollout_ref.rollout.max_num_batched_tokens=2048",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=512",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "transfer_queue.enable=true",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    config_dir = Path(next(iter(verl.__path__))) / "trainer" / "config"
    with hydra.initialize_config_dir(str(config_dir), version_base=None):
        return hydra.compose("ppo_trainer", overrides=settings)


async def send_weights(config: DictConfig, directory: str, step: int) -> str:
    """What a worker of the actor does after an update: the weights through shared memory, then the new version; by
    which socket.
    """
    from safetensors.torch import load_file
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.base import get_rollout_class

    os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    adapter = get_rollout_class("vllm")(config=rollout, model_config=None, device_mesh=None, replica_rank=0)
    await adapter.update_weights(iter(load_file(Path(directory) / "model.safetensors").items()), global_steps=step)
    return adapter.zmq_handle


def record(prompt: list[int], output: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "tokens": list(output.token_ids),
        "log_probs": list(output.log_probs),
        "entropies": output.extra_fields["rollout_entropies"].tolist(),
        "versions": output.extra_fields["rollout_versions"].tolist(),
        "stop_reason": output.stop_reason,
    }


async def under_way(server: Any, responses: int) -> None:
    """Wait until every one of so many responses has a few tokens; the requests are long enough to be far from their end
    then.
    """
    while True:
        lengths = await server.__ray_call__.remote(
            lambda self: [len(output.outputs[0].token_ids) for output in self._tap._outputs.values()]
        )
        if len(lengths) == responses and min(lengths) >= 8:
            return
        await asyncio.sleep(0.02)


async def interrupt(
    manager: Any, config: DictConfig, other_weights: str, count: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Abort responses half-way, send other weights, resume: partial rollouts of colocate_async and separate_async."""
    from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient

    client = manager.get_client(client_cls=EntropyFullyAsyncClient)
    replica = manager.get_replicas()[0]
    prompts = [[2 + 7 * i, 3 + i, 5] for i in range(count)]
    params = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": max_tokens}
    pending = [
        asyncio.ensure_future(client.generate(f"r{i}", prompt_ids=prompt, sampling_params=dict(params)))
        for i, prompt in enumerate(prompts)
    ]
    await under_way(replica.server_handle, responses=len(prompts))
    await replica.abort_all_requests()
    await send_weights(config, other_weights, step=2)
    await replica.resume_generation()
    return [record(prompt, output) for prompt, output in zip(prompts, await asyncio.gather(*pending), strict=True)]


def columns(partition: str, keys: list[str]) -> list[dict[str, Any]]:
    import transfer_queue as tq

    names = [
        "prompts",
        "responses",
        "response_mask",
        "rollout_log_probs",
        "rollout_entropies",
        "rollout_versions",
        "extra_fields",
    ]
    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=names)
    extra = data.pop("extra_fields").tolist()
    assert data["rollout_entropies"].dtype == torch.float32
    rows = [{name: data[name][i].tolist() for name in names[:-1]} for i in range(len(keys))]
    return [{**row, "extra_fields": sorted(fields)} for row, fields in zip(rows, extra, strict=True)]


def through_transfer_queue(agents: Any, validate: bool) -> list[dict[str, Any]]:
    """Three prompts through verl's agent loop workers into TransferQueue, and the columns out of it."""
    import numpy as np
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    def column(values: list[Any]) -> np.ndarray:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    partition = "val" if validate else "train"
    texts = ["1+2", "what is the sum of 3 and 9?", "4+4"]
    batch = tu.get_tensordict(
        {
            "raw_prompt": column([[{"role": "user", "content": text}] for text in texts]),
            "uid": column([f"{partition}{i}" for i in range(len(texts))]),
            "index": column(list(range(len(texts)))),
            "agent_name": column(["single_turn_agent", "tool_agent", "two_turns"]),
        }
    )
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    tu.assign_non_tensor_data(batch, "validate", validate)
    agents.generate_sequences(batch)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        tags = tq.kv_list(partition_id=partition).get(partition, {})
        if sum(tag.get("status") in ("finished", "failure") for tag in tags.values()) == len(texts):
            return columns(partition, sorted(key for key, tag in tags.items() if tag.get("status") == "success"))
        time.sleep(0.1)
    raise TimeoutError(f"TransferQueue holds {tags}")


def kill_worker(manager: Any) -> dict[str, Any]:
    """Kill vLLM's worker process in the middle of a response; what the caller hears, and the check of the servers."""
    import psutil

    from gtpo_verl.integrations.health import dead_servers
    from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient

    server = manager.get_replicas()[0].server_handle
    (pid,) = of_workers(server, process_of)
    worker = psutil.Process(pid)
    client = manager.get_client(client_cls=EntropyFullyAsyncClient)
    alive = dead_servers(manager.server_handles)

    async def generate() -> dict[str, Any]:
        params = {"temperature": 1.0, "logprobs": True, "max_tokens": 480}
        pending = asyncio.ensure_future(client.generate("killed", prompt_ids=[5, 6], sampling_params=params))
        await under_way(server, responses=1)
        worker.kill()
        killed = time.monotonic()
        try:
            await asyncio.wait_for(pending, timeout=60)
        except ray.exceptions.RayTaskError as error:
            return {"error": str(error), "seconds": time.monotonic() - killed}
        return {"error": None}

    return asyncio.run(generate()) | {"alive": alive, "dead": dead_servers(manager.server_handles)}


def stock(config: DictConfig) -> dict[str, Any]:
    """verl's own server, as reward models and teachers use it, beside the policy's: the ranks of what it samples."""
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class Stock(vLLMHttpServer):
        async def ranks(self) -> list[int]:
            from vllm import SamplingParams

            params = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, ignore_eos=True)
            async for output in self.engine.generate({"prompt_token_ids": [5, 6]}, params, "stock"):
                last = output.outputs[0]
            return [entry[token].rank for token, entry in zip(last.token_ids, last.logprobs, strict=True)]

    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    server = (
        ray.remote(Stock).options(max_concurrency=8).remote(rollout, model, RolloutMode.STANDALONE, [], 2, 0, 1, 1, "")
    )
    ray.get(server.launch_server.remote())
    ranks = ray.get(server.ranks.remote())
    ray.kill(server)
    return {"ranks": ranks}


def unpatched(config: DictConfig) -> dict[str, Any]:
    """Start our server over a worker that nothing patches; what its start says."""
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from gtpo_verl.integrations.vllm.server import EntropyVLLMHttpServer

    class Unpatched(EntropyVLLMHttpServer):
        def _get_worker_extension_cls(self) -> str:
            return vLLMHttpServer._get_worker_extension_cls(self)

    actor_class = ray.remote(Unpatched).options(runtime_env={"env_vars": {"VLLM_PLUGINS": "none"}}, max_concurrency=8)
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    server = actor_class.remote(rollout, model, RolloutMode.STANDALONE, [], 1, 0, 1, 1, "")
    try:
        ray.get(server.launch_server.remote())
    except ray.exceptions.RayTaskError as error:
        return {"error": str(error)}
    return {"error": None}


def main(request: dict[str, Any]) -> dict[str, Any]:
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.workers.rollout.llm_server import LLMServerManager

    from gtpo_verl.integrations.vllm.wiring import AGENT_LOOPS, enable_rollout_entropy

    ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, log_to_driver=bool(request.get("verbose")))
    try:
        config = compose(request["model"])
        # ours, and one of a user's own
        loops = Path(request["model"]) / "agent_loops.yaml"
        loops.write_text(AGENT_LOOPS.read_text() + "- name: two_turns\n  _target_: two_turns.TwoTurnsWithEntropies\n")
        OmegaConf.update(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path", str(loops), force_add=True)
        enable_rollout_entropy(config)
        tq.init(config.transfer_queue)
        manager = LLMServerManager.create(config=config)
        agents = AgentLoopManagerTQ.create(config=config, llm_client=manager.get_client())
        server = manager.get_replicas()[0].server_handle
        answer: dict[str, Any] = {"runners": of_workers(server, runner_of)}
        if not request["only"]:
            answer["transfer_queue"] = through_transfer_queue(agents, validate=False)
        sender = asyncio.run(send_weights(config, request["model"], step=1))
        answer["sockets"] = {"sender": sender, "receivers": of_workers(server, socket_of)}
        if not request["only"]:
            answer["validation"] = through_transfer_queue(agents, validate=True)
        interrupted = interrupt(
            manager, config, request["other_weights"], request["interrupted"], request["max_tokens"]
        )
        answer["interrupted"] = asyncio.run(interrupted)
        if request["only"]:
            return answer
        answer["stock"] = stock(config)
        answer["killed"] = kill_worker(manager)
        answer["unpatched"] = unpatched(config)
        return answer
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    request_file, answer_file = map(Path, sys.argv[1:])
    answer_file.write_text(json.dumps(main(json.loads(request_file.read_text()))))
