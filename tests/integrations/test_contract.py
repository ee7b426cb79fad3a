"""The contract with verl, vLLM, TransferQueue and Ray: every symbol of theirs that the plugin calls, overrides or
subclasses.

Each line of ``CONTRACT`` says what the plugin relies on. When a release changes one of them, the failing line says
which, before a run does; and a use that has no line fails too, so the list is whole. How a line is written:

* ``"(self, config, *, name=)"``: exactly these parameters; ``=`` has a default, ``*`` before keyword-only ones.
* ``{"name", ...}``: at least these parameters or fields, for a constructor with many that are not ours to pin.
* ``"class"``: a base class or a type; what is used of it has lines of its own.
* ``"attribute"``: set on ``self`` somewhere in the class, or in a class it derives from.
* ``"anything"``: it is there; what is used of it has lines of its own.
* ``"property"``, or the name of the type for everything else: a registry is a ``dict``.
"""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gtpo_verl.integrations

INTEGRATIONS = Path(gtpo_verl.integrations.__file__).parent
FOREIGN = ("verl", "vllm", "transfer_queue", "ray")
# Triton kernels import Triton, which a machine without an accelerator may have in no usable form; they use nothing of
# verl or vLLM.
NOT_IMPORTED = ("gtpo_verl.integrations.vllm.triton_kernels",)

Expected = str | set[str]

# Grouped by module; lines of a class are in the module that defines the member, whatever derives from it.
CONTRACT: dict[str, dict[str, Expected]] = {
    "ray.exceptions": {
        "ActorUnavailableError": "class",
        "GetTimeoutError": "class",
        "OutOfMemoryError": "class",
        "RayActorError": "class",
        "RayError": "class",
        "RayTaskError": {"cause"},
    },
    "ray": {
        "available_resources": "()",
        "cluster_resources": "()",
        "get_actor": "(name, namespace=)",
        "get_runtime_context": "()",
        "is_initialized": "()",
        "kill": "(actor, *, no_restart=)",
        "nodes": "()",
        "get": "(object_refs, *, timeout=, _use_object_store=)",
        "wait": "(ray_waitables, *, num_returns=, timeout=, fetch_local=)",
        "init": {"num_cpus", "num_gpus", "include_dashboard", "runtime_env"},
        "put": "(value, *, _owner=, _tensor_transport=)",
        "remote": "(*args, **kwargs)",
        "shutdown": "(*, wait_for_processes=, _exiting_interpreter=)",
    },
    "ray.runtime_context": {
        "RuntimeContext.get_job_id": "(self)",
    },
    "ray.util.scheduling_strategies": {
        "NodeAffinitySchedulingStrategy": {"node_id", "soft"},
    },
    "ray.util.placement_group": {
        "PlacementGroup": "class",
        "PlacementGroup.wait": "(self, timeout_seconds=)",
        "placement_group": {"bundles", "strategy"},
        "placement_group_table": "(placement_group=)",
        "remove_placement_group": "(placement_group)",
    },
    "transfer_queue": {
        "KVBatchMeta": {"keys", "tags", "partition_id"},
        "async_kv_batch_put": "(keys, partition_id, fields=, tags=, data_parser=)",
        "close": "()",
        "init": "(conf=)",
        "kv_batch_get": "(keys, partition_id, select_fields=)",
        "kv_batch_put": "(keys, partition_id, fields=, tags=, data_parser=)",
        "kv_clear": "(keys, partition_id)",
        "kv_list": "(partition_id=)",
    },
    # what queue_namespace.py puts in their place is of no matter: TransferQueue finds it under these names
    "transfer_queue.interface": {
        "TransferQueueController": "anything",
        "_TQ_CLIENT": "anything",
        "_TQ_CONTROLLER": "anything",
        "_TQ_STORAGE": "anything",
        "close": "()",
        "ray": "anything",
    },
    "transfer_queue.storage.clients.ray_storage_client": {
        "RayObjectRefStorage": "anything",
        "ray": "anything",
    },
    "ray.util": {
        "get_node_ip_address": "(address=)",
    },
    "verl.checkpoint_engine.base": {
        "CheckpointEngine": "class",
        "CheckpointEngine.build_topology": "(cls, actor_wg_world_size, rollout_world_size, metadata)",
        "CheckpointEngine.finalize": "(self)",
        "CheckpointEngine.init_process_group": "(self, **kwargs)",
        "CheckpointEngine.prepare": "(self)",
        "CheckpointEngine.receive_weights": "(self, global_steps=)",
        "CheckpointEngine.send_weights": "(self, weights, global_steps=)",
        "CheckpointEngineRegistry": "class",
        "CheckpointEngineRegistry._import_errors": "dict",
        "CheckpointEngineRegistry._registry": "dict",
        "CheckpointEngineRegistry.register": "(backend)",
    },
    "verl.experimental.agent_loop.agent_loop": {
        "AgentLoopBase": "class",
        "AgentLoopBase.__init__": "(self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, hf_model_type=, **kwargs)",
        "AgentLoopBase.ct_build_initial_tokens": "(self, messages, tools=, images=, videos=, audios=, mm_inputs_out=)",
        "AgentLoopBase.ct_merge_assistant_token": "(self, runtime_token_ids, assistant_token_ids, response_mask, response_logprobs=, assistant_logprobs=)",
        "AgentLoopBase.ct_merge_context_msg": "(self, previous_messages, updated_messages, runtime_token_ids, response_mask, response_logprobs=, tools=)",
        "AgentLoopBase.run": "(self, sampling_params, **kwargs)",
        "AgentLoopBase.server_manager": "attribute",
        "AgentLoopMetrics": "class",
        "AgentLoopOutput": {"prompt_ids", "response_ids", "response_mask", "reward_score", "num_turns", "extra_fields"},
        "AgentLoopOutput.as_dict": "(self)",
        "AgentLoopOutput.model_config": "dict",
        "AgentLoopManager.agent_loop_workers": "attribute",
        "AgentLoopWorker.__init__": "(self, config, llm_client, teacher_client=, reward_loop_worker_handles=)",
        "AgentLoopWorker._compute_multi_modal_inputs": "(self, output, input_ids)",
        "AgentLoopWorker._compute_position_ids": "(self, input_ids, attention_mask, multi_modal_inputs, mm_processor_kwargs=)",
        "AgentLoopWorker._compute_score": "(self, outputs, kwargs)",
        "AgentLoopWorker._compute_teacher_logprobs": "(self, output, prompt_ids, response_ids, validate, sample_kwargs=)",
        "AgentLoopWorker._run_agent_loop": "(self, sampling_params, trajectory, *, agent_name, trace=, **kwargs)",
        "AgentLoopWorker.config": "attribute",
        "AgentLoopWorker.dataset_cls": "attribute",
        "AgentLoopWorker.hf_model_type": "attribute",
        "AgentLoopWorker.llm_client": "attribute",
        "AgentLoopWorker.processor": "attribute",
        "AgentLoopWorker.reward_loop_worker_handles": "attribute",
        "AgentLoopWorker.teacher_client": "attribute",
        "AgentLoopWorker.tokenizer": "attribute",
        "AgentLoopWorker.tools": "attribute",
        "DictConfigWrap": "(config)",
        "ToolListWrap": "(tools)",
        "_agent_loop_registry": "dict",
    },
    "verl.experimental.agent_loop.single_turn_agent_loop": {
        "SingleTurnAgentLoop": "class",
    },
    "verl.experimental.agent_loop.tool_agent_loop": {
        "ToolAgentLoop": "class",
    },
    "verl.experimental.reward_loop": {
        "RewardLoopManager": "(config, rm_resource_pool=)",
    },
    "verl.experimental.reward_loop.reward_loop": {
        "RewardLoopManager._init_reward_loop_workers": "(self)",
        "RewardLoopManager.reward_loop_workers": "attribute",
        "RewardLoopManager.reward_loop_workers_class": "attribute",
        "RewardLoopWorker": "class",
        "RewardLoopWorker.__init__": "(self, config, reward_router_address=)",
        "RewardLoopWorker.compute_score": "(self, data)",
    },
    "verl.experimental.separation.engine_workers": {
        "DetachActorWorker.copy_handler": "property",
    },
    "verl.plugin.platform": {
        "get_platform": "()",
    },
    "verl.plugin.platform.platform_base": {
        "PlatformBase": "class",
        "PlatformBase.communication_backend_name": "(self)",
        "PlatformBase.cudart": "(self)",
        "PlatformBase.current_device": "(self)",
        "PlatformBase.device_count": "(self)",
        "PlatformBase.device_module": "property",
        "PlatformBase.device_name": "property",
        "PlatformBase.empty_cache": "(self)",
        "PlatformBase.get_device_capability": "(self, device_index=)",
        "PlatformBase.is_available": "(self)",
        "PlatformBase.is_ipc_supported": "(self)",
        "PlatformBase.manual_seed": "(self, seed)",
        "PlatformBase.manual_seed_all": "(self, seed)",
        "PlatformBase.nvtx_range": "(self, msg)",
        "PlatformBase.profiler_start": "(self)",
        "PlatformBase.profiler_stop": "(self)",
        "PlatformBase.ray_noset_envvars": "(self)",
        "PlatformBase.ray_resource_name": "(self)",
        "PlatformBase.set_allocator_settings": "(self, settings)",
        "PlatformBase.set_device": "(self, device_index)",
        "PlatformBase.synchronize": "(self, device_index=)",
        "PlatformBase.vendor_name": "property",
        "PlatformBase.visible_devices_envvar": "(self)",
    },
    "verl.plugin.platform.platform_manager": {
        "PlatformRegistry": "class",
        "PlatformRegistry.register": "(cls, platform)",
    },
    "verl.single_controller.base.worker_group": {
        "WorkerGroup._workers": "attribute",
    },
    "verl.single_controller.ray": {
        "RayWorkerGroup": "class",
        "RayWorkerGroup.spawn": "(self, prefix_set)",
    },
    "verl.single_controller.ray.base": {
        "ResourcePoolManager": {"resource_pool_spec", "mapping"},
        "ResourcePoolManager._check_resource_available": "(self)",
        "ResourcePoolManager.max_colocate_count": "int",
        "get_master_addr_port": "anything",
    },
    "verl.trainer.constants_ppo": {
        "get_ppo_ray_runtime_env": "(config=)",
    },
    "verl.trainer.main_ppo": {
        "run_ppo": "(config, task_runner_class)",
    },
    "verl.protocol": {
        "DataProto": {"batch", "non_tensor_batch"},
    },
    "verl.trainer.ppo.core_algos": {
        "ADV_ESTIMATOR_REGISTRY": "dict",
        "POLICY_LOSS_REGISTRY": "dict",
        "agg_loss": "(loss_mat, loss_mask, loss_agg_mode, dp_size=, batch_num_tokens=, global_batch_size=, loss_scale_factor=)",
        "register_adv_est": "(name_or_enum)",
        "register_policy_loss": "(name)",
    },
    "verl.trainer.ppo.ray_trainer": {
        "compute_advantage": "(data, adv_estimator, gamma=, lam=, num_repeat=, norm_adv_by_std_in_grpo=, config=)",
    },
    "verl.trainer.ppo.reward": {
        "get_custom_reward_fn": "(config)",
    },
    "verl.trainer.ppo.utils": {
        "create_rl_dataset": "(data_paths, data_config, tokenizer, processor, is_train=, max_samples=)",
        "need_critic": "(config)",
        "need_teacher_policy": "(config)",
        "need_reference_policy": "(config)",
    },
    "verl.trainer.ppo.v1": {
        "AgentLoopManagerTQ": "class",
        "AgentLoopManagerTQ.create": "(cls, *args, **kwargs)",
        "AgentLoopManagerTQ.generate_sequences": "(self, prompts)",
        "AgentLoopWorkerTQ": "anything",
        "AgentLoopWorkerTQ.__ray_actor_class__": "class",
    },
    "verl.trainer.ppo.v1.agent_loop_tq": {
        "tq": "anything",
        "AgentLoopManagerTQ.create": "(cls, *args, **kwargs)",
        "AgentLoopManagerTQ.__init__": "(self, *args, **kwargs)",
        "AgentLoopManagerTQ.agent_loop_workers_class": "attribute",
        "AgentLoopWorkerTQ.__init__": "(self, *args, **kwargs)",
        "AgentLoopWorkerTQ._run_prompt": "(self, prompt, sampling_params, trajectory, trace=)",
    },
    "verl.trainer.ppo.v1.replay_buffer": {
        "DAPO_FILTERED_REWARD_COUNTS_KEY": "str",
        "ReplayBuffer": "class",
        "ReplayBuffer.__init__": "(self, trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, sampler_kwargs, poll_interval=, refill_fn=, filter_groups_metric=, train_batch_size=, gen_batch_size=, max_inflight_gen_batches=, sync_refill_failed_groups=)",
        "ReplayBuffer._clear_groups": "(self, partition_id, uids)",
        "ReplayBuffer._materialize_batch": "(self, partition_id, selected_prompt_uids, partition_snapshot)",
        "ReplayBuffer._sync_metadata_from_transfer_queue": "(self)",
        "ReplayBuffer._wait_for_next_poll": "(self, partition_id, last_debug_time)",
        "ReplayBuffer.failure_keys": "attribute",
        "ReplayBuffer.filter_groups_metric": "attribute",
        "ReplayBuffer.finished_keys": "attribute",
        "ReplayBuffer.max_inflight_gen_batches": "attribute",
        "ReplayBuffer.partitions": "attribute",
        "ReplayBuffer.pending_keys": "attribute",
        "ReplayBuffer.prompt_global_steps": "attribute",
        "ReplayBuffer.refill_fn": "attribute",
        "ReplayBuffer.running_keys": "attribute",
        "ReplayBuffer.sample": "(self, global_steps, partition_id, batch_size)",
        "ReplayBuffer.train_batch_size": "attribute",
    },
    "verl.trainer.ppo.v1.trainer_base": {
        "PPOTrainer": "class",
        "PPOTrainer.__init__": "(self, config)",
        "PPOTrainer._add_prompts_to_generate": "(self, num_prompts)",
        "PPOTrainer._build_replay_buffer": "(self)",
        "PPOTrainer._compute_advantage": "(self, batch, metrics)",
        "PPOTrainer._compute_metrics": "(self, batch, metrics, timing_raw, global_steps, epoch)",
        "PPOTrainer._compute_old_log_prob": "(self, batch, metrics)",
        "PPOTrainer._dump_generations": "(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path)",
        "PPOTrainer._init_resource_pool_mgr": "(self)",
        "PPOTrainer._load_checkpoint": "(self)",
        "PPOTrainer._next_train_batch": "(self, num_prompts=)",
        "PPOTrainer._resolve_filter_groups_metric": "(self)",
        "PPOTrainer._rollout_server_managers": "(self)",
        "PPOTrainer._save_checkpoint": "(self)",
        "PPOTrainer._setup": "(self)",
        "PPOTrainer._step_once": "(self, metrics, timing_raw, sample_batch_size)",
        "PPOTrainer._update_actor": "(self, batch, metrics)",
        "PPOTrainer._update_critic": "(self, batch, metrics)",
        "PPOTrainer._val_metrics_update": "(self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts=)",
        "PPOTrainer._validate": "(self)",
        "PPOTrainer.actor_rollout_wg": "attribute",
        "PPOTrainer.agent_loop_manager": "attribute",
        "PPOTrainer.config": "attribute",
        "PPOTrainer.fit": "(self, agent_loop_manager)",
        "PPOTrainer.get_llm_client": "(self)",
        "PPOTrainer.get_reward_handles": "(self)",
        "PPOTrainer.get_teacher_client": "(self)",
        "PPOTrainer.global_steps": "attribute",
        "PPOTrainer.init": "(self)",
        "PPOTrainer.llm_server_manager": "attribute",
        "PPOTrainer.local_trigger_step": "attribute",
        "PPOTrainer.logger": "attribute",
        "PPOTrainer.on_sample_begin": "(self)",
        "PPOTrainer.on_sample_end": "(self)",
        "PPOTrainer.on_step_end": "(self)",
        "PPOTrainer.parameter_sync_step": "attribute",
        "PPOTrainer.on_train_begin": "(self)",
        "PPOTrainer.prepare_step": "(self)",
        "PPOTrainer.replay_buffer": "attribute",
        "PPOTrainer.reward_loop_manager": "attribute",
        "PPOTrainer.role_worker_mapping": "attribute",
        "PPOTrainer.step": "(self, metrics, timing_raw)",
        "PPOTrainer.tokenizer": "attribute",
        "PPOTrainer.total_training_steps": "attribute",
        "PPOTrainer.train_dataloader": "attribute",
        "PPOTrainer.trainer_mode": "attribute",
        "RayWorkerGroup": "class",
        "RewardLoopManager": "class",
        "get_trainer_cls": "(name)",
    },
    "verl.utils": {
        "hf_tokenizer": "(name_or_path, correct_pad_token=, correct_gemma2=, **kwargs)",
    },
    "verl.utils.config": {
        "omega_conf_to_dataclass": "(config, dataclass_type=)",
        "validate_config": "(config, use_reference_policy, use_critic)",
    },
    "verl.utils.dataset.rl_dataset": {
        "collate_fn": "(data_list)",
    },
    "verl.utils.debug.metrics": {
        "calculate_debug_metrics": "(data)",
    },
    "verl.utils.device": {
        "auto_set_device": "(config)",
        "get_device_name": "()",
    },
    "verl.utils.distributed": {
        "initialize_global_process_group_ray": "(timeout_second=, backend=)",
    },
    "verl.utils.import_utils": {
        "import_external_libs": "(external_libs=)",
        "load_class_from_fqn": "(fqn, description=)",
        "resolve_config_path": "(config_path)",
    },
    "verl.utils.logging_utils": {
        "configure_verl_logging": "()",
    },
    "verl.utils.profiler": {
        "simple_timer": "(name, timing_raw)",
    },
    "verl.utils.rollout_trace": {
        "rollout_trace_attr": "(sample_index=, step=, rollout_n=, name=, validate=, trace=)",
    },
    "verl.utils.torch_functional": {
        "logprobs_from_logits_v2": "(logits, labels)",
    },
    "verl.utils.reward_score": {
        "default_compute_score": {"data_source", "solution_str", "ground_truth", "extra_info"},
    },
    "verl.utils.tensordict_utils": {
        "assign_non_tensor_data": "(tensor_dict, key, val)",
        "assign_non_tensor_stack": "(tensor_dict, key, val)",
        "get_tensordict": "(tensor_dict, non_tensor_dict=)",
        "list_of_dict_to_tensordict": "(list_of_dicts)",
    },
    "verl.utils.tokenizer.continuous_token": {
        "MergeResult": {"appended_token_count", "inserted_token_ids", "kind", "removed_prefix_token_count"},
    },
    "verl.utils.tokenizer.continuous_token_wiring": {
        "create_continuous_token_builder": {"tokenizer", "hf_model_type", "chat_template_kwargs"},
    },
    "verl.utils.tracking": {
        "Tracking.finish": "(self, exit_code=)",
    },
    "verl.workers.config": {
        "ActorConfig": {"clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "policy_loss", "global_batch_info"},
        "HFModelConfig": "class",
        "PolicyLossConfig": {"loss_mode"},
    },
    "verl.workers.engine_workers": {
        "ActorRolloutRefWorker.__init__": {"self", "config", "role"},
    },
    "verl.workers.rollout.base": {
        "_ROLLOUT_REGISTRY": "dict",
        "BaseRollout.config": "attribute",
    },
    "verl.workers.rollout.vllm_rollout.vllm_rollout": {
        "ServerAdapter": "class",
        "ServerAdapter.__init__": "(self, config, model_config, device_mesh, replica_rank=)",
        "ServerAdapter._execute_method": "(self, method, non_block=, timeout=, args=, kwargs=)",
        "ServerAdapter.update_weights": "(self, weights, global_steps=, wire_format=, **kwargs)",
        "ServerAdapter.zmq_handle": "attribute",
    },
    "verl.workers.rollout.llm_server": {
        "FullyAsyncLLMServerClient": "class",
        "FullyAsyncLLMServerClient.generate": "(self, request_id, *, prompt_ids, sampling_params, image_data=, video_data=, audio_data=, mm_processor_kwargs=, **kwargs)",
        "LLMServerClient": "class",
        "LLMServerClient.__init__": "(self, config, load_balancer_handle=, **kwargs)",
        "LLMServerClient.config": "attribute",
        "LLMServerClient._acquire_server": "(self, request_id, **extra)",
        "LLMServerClient.generate": "(self, request_id, *, prompt_ids, sampling_params, image_data=, video_data=, audio_data=, mm_processor_kwargs=, **kwargs)",
        "LLMServerManager": "(config, worker_group=, rollout_resource_pool=, start_rank=, load_balancer_cls=)",
        "LLMServerManager.__init__": "(self, config, worker_group=, rollout_resource_pool=, start_rank=, load_balancer_cls=)",
        "LLMServerManager._init_global_load_balancer": "(self)",
        "LLMServerManager.create": "(cls, *args, **kwargs)",
        "LLMServerManager.get_client": "(self, client_cls=, **kwargs)",
        "LLMServerManager.rollout_replica_class": "attribute",
        "LLMServerManager.rollout_replicas": "attribute",
        "LLMServerManager.server_addresses": "attribute",
        "LLMServerManager.server_handles": "attribute",
    },
    "verl.workers.rollout.router": {
        "get_router_handle": "(servers, router_config_path=, full_determinism=, load_balancer_cls=)",
    },
    "verl.workers.rollout.replica": {
        "RolloutReplica": "class",
        "RolloutReplica.is_reward_model": "attribute",
        "RolloutReplica.is_teacher_model": "attribute",
        "RolloutReplicaRegistry": "class",
        "RolloutReplicaRegistry.register": "(cls, name, loader)",
        "TokenOutput": {"token_ids", "log_probs", "extra_fields"},
        "get_rollout_replica_class": "(rollout, disaggregation_enabled=)",
    },
    "verl.workers.rollout.vllm_rollout.utils": {
        "vLLMColocateWorkerExtension": "class",
        "vLLMColocateWorkerExtension.__new__": "(cls, **kwargs)",
        "vLLMColocateWorkerExtension._get_zmq_handle": "(self)",
    },
    "verl.workers.rollout.vllm_rollout.vllm_async_server": {
        "vLLMHttpServer": "class",
        "vLLMHttpServer.__init__": "(self, config, model_config, rollout_mode, workers, replica_rank, node_rank, gpus_per_node, nnodes, cuda_visible_devices, disaggregation_role=, disaggregation_kv_transfer_config=)",
        "vLLMHttpServer._get_worker_extension_cls": "(self)",
        "vLLMHttpServer.config": "attribute",
        "vLLMHttpServer.engine": "attribute",
        "vLLMHttpServer.generate": "(self, prompt_ids, sampling_params, request_id, image_data=, video_data=, audio_data=, mm_processor_kwargs=, priority=, kv_transfer_params=)",
        "vLLMHttpServer.run_server": "(self, args)",
        "vLLMReplica": "class",
        "vLLMReplica.__init__": "(self, replica_rank, config, model_config, gpus_per_node=, is_reward_model=, is_teacher_model=, name_suffix=)",
        "vLLMReplica.server_class": "attribute",
    },
    "verl.workers.utils.losses": {
        "ppo_loss": "(config, model_output, data, dp_group=)",
    },
    "vllm": {
        "LLM": {"model", "skip_tokenizer_init", "dtype", "enforce_eager", "gpu_memory_utilization", "kwargs"},
        "LLM.generate": {"prompts", "sampling_params"},
        "SamplingParams": {
            "temperature",
            "top_p",
            "top_k",
            "repetition_penalty",
            "n",
            "seed",
            "max_tokens",
            "logprobs",
            "ignore_eos",
            "detokenize",
            "output_kind",
        },
        "__version__": "str",
    },
    "vllm._custom_ops": {
        "_supports_onednn": "bool",
    },
    "vllm.inputs": {
        "TokensPrompt": {"prompt_token_ids"},
    },
    "vllm.logprobs": {
        "FlatLogprobs": {"start_indices", "ranks"},
        "Logprob": {"rank", "logprob"},
    },
    "vllm.model_executor.layers.utils": {
        "check_cpu_sgl_kernel": "(n, k, dtype)",
    },
    "vllm.outputs": {
        "CompletionOutput": {"token_ids", "logprobs"},
        "RequestOutput": {"outputs"},
    },
    "vllm.sampling_params": {
        "RequestOutputKind": "class",
        "RequestOutputKind.FINAL_ONLY": "RequestOutputKind",
    },
    "vllm.platforms": {
        "current_platform": "anything",
        "current_platform.is_cpu": "(self)",
    },
    "vllm.v1.engine.async_llm": {
        "AsyncLLM": "class",
        "AsyncLLM.errored": "property",
        "AsyncLLM.generate": {"request_id"},
        "AsyncLLM.shutdown": "(self, timeout=)",
    },
    "vllm.v1.outputs": {
        "LogprobsTensors": {"logprob_token_ids", "logprobs", "selected_token_ranks"},
    },
    "vllm.v1.sample.rejection_sampler": {
        "expand_batch_to_tokens": "(x, cu_num_tokens, num_tokens, replace_from=, replace_to=)",
        "RejectionSampler._get_logprobs_tensors": "(self, max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids)",
    },
    "vllm.v1.sample.sampler": {
        "Sampler.forward": "(self, logits, sampling_metadata, predict_bonus_token=, logprobs_mode_override=)",
        "Sampler.gather_logprobs": "(logprobs, num_logprobs, token_ids)",
    },
}

# Nothing of ours names these: they call what we register, with these arguments, or hand us their objects.
UNNAMED = {
    "vllm.outputs.RequestOutput",
    "verl.trainer.ppo.ray_trainer.compute_advantage",
}


# -------------------------------------------------------------------- what is there


def find(module: str, name: str) -> object:
    """The symbol, unbound: a class method or static method as the function it wraps."""
    target: object = importlib.import_module(module)
    for part in name.split("."):
        if inspect.isclass(target):
            owner = next((cls for cls in target.__mro__ if part in vars(cls)), None)
            if owner is None:
                raise AttributeError(f"{target.__qualname__} has no {part}")
            target = vars(owner)[part]
        else:
            target = getattr(target, part)
    return getattr(target, "__func__", target)


def parameters(target: Any) -> str:
    """A signature without annotations and the values of defaults, which may change without harm."""
    parts, star = [], False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.name == "_ray_trace_ctx":  # Ray's, once a test has made an actor of the class
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(f"{prefix}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return f"({', '.join(parts)})"


def fields(target: Any) -> set[str]:
    """Parameters of a function, or the names one may construct a class with and read from it."""
    if inspect.isclass(target) and issubclass(target, dict):  # a TypedDict, of typing or of typing_extensions
        return set(target.__annotations__)
    names = set(inspect.signature(target).parameters)
    if inspect.isclass(target):
        names |= {name for cls in target.__mro__ for name in vars(cls).get("__annotations__", {})}
    return names


@functools.cache
def assigned(cls: type) -> frozenset[str]:
    """Names that a class sets on ``self``, in any of its methods."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def sets(cls: type, name: str) -> bool:
    return any(name in assigned(base) for base in cls.__mro__ if is_foreign(base.__module__))


def found(module: str, name: str, expected: Expected) -> Expected:
    """What the installed packages have in the place of a line of the contract, written as the line is."""
    if expected == "attribute":
        owner, _, attribute = name.rpartition(".")
        cls = find(module, owner)
        assert inspect.isclass(cls)
        return "attribute" if sets(cls, attribute) else "nothing"
    target = find(module, name)
    if isinstance(expected, set):
        return fields(target) & expected
    if expected == "anything":
        return "anything"
    if expected == "class":
        return "class" if inspect.isclass(target) else type(target).__name__
    if isinstance(target, property):
        return "property"
    if isinstance(target, ModuleType):
        return "module"
    return parameters(target) if callable(target) else type(target).__name__


def breaches(contract: dict[str, dict[str, Expected]]) -> list[str]:
    """One line for each symbol that is not as the contract says."""
    lines = []
    for module, names in contract.items():
        for name, expected in names.items():
            try:
                actual = found(module, name, expected)
            except (ImportError, AttributeError) as error:
                lines.append(f"{module}.{name} is gone: {error}")
                continue
            if actual != expected:
                lines.append(f"{module}.{name} was {expected} and is {actual}")
    return lines


# -------------------------------------------------------------------- what the plugin uses


def is_foreign(module: str) -> bool:
    return module.split(".")[0] in FOREIGN


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(INTEGRATIONS.rglob("*.py")):
        name = ".".join(path.relative_to(INTEGRATIONS.parent.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a module imports of theirs, of what it takes from that by a dot, and of modules named in
    strings.
    """
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and is_foreign(node.module):
            for alias in node.names:
                local[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_foreign(alias.name):
                    local[alias.asname or alias.name.split(".")[0]] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
            yield f"{local[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(verl|vllm)(\.\w+)+", str(node.value)):
            yield str(node.value)


def inherited(module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """Dotted names of what the module's classes override of theirs, call through ``super()`` or touch on ``self``."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        cls = getattr(module, node.name)
        theirs = [base for base in cls.__mro__ if is_foreign(base.__module__)]
        if not theirs:
            continue
        touched = {
            part.attr
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("self", "super()")
        }
        for name in touched | set(vars(cls)) & written_in(node):
            owner = next((base for base in theirs if name in vars(base)), None)
            if owner is None:
                owner = next((base for base in theirs if name in assigned(base)), None)
            if owner is not None:
                yield f"{owner.__module__}.{owner.__qualname__}.{name}"
            else:
                assert is_ours(cls, name), f"{cls.__qualname__}.{name}: nobody sets it"


def written_in(node: ast.ClassDef) -> set[str]:
    """Names that stand in a class body: methods, fields, constants."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in node.body:
        if isinstance(part, ast.Assign):
            names |= {target.id for target in part.targets if isinstance(target, ast.Name)}
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
    return names


def is_ours(cls: type, name: str) -> bool:
    return any(
        name in vars(base) or name in vars(base).get("__annotations__", {}) or name in assigned(base)
        for base in cls.__mro__
        if base.__module__.startswith("gtpo_verl")
    )


def uses() -> set[str]:
    names: set[str] = set()
    for name, tree in modules():
        names |= set(imported(tree))
        if name not in NOT_IMPORTED:
            names |= set(inherited(importlib.import_module(name), tree))
    return {name for name in names if not is_module(name)}


def is_module(name: str) -> bool:
    """Whether the name is that of a module, whose symbols have lines of their own."""
    if name in sys.modules:  # also one that the plugin keeps from being imported
        return True
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def lines() -> set[str]:
    return {f"{module}.{name}" for module, names in CONTRACT.items() for name in names}


# -------------------------------------------------------------------- tests


@pytest.mark.parametrize("module", CONTRACT)
def test_the_symbols_are_as_the_contract_says(module: str) -> None:
    assert breaches({module: CONTRACT[module]}) == []


def test_every_use_has_a_line() -> None:
    """A name of theirs that the plugin imports, overrides or touches, and that the contract does not know, may change
    unseen.
    """
    assert sorted(uses() - lines()) == []


def test_every_line_has_a_use() -> None:
    """A line that nothing in the plugin names any more holds a release back for nothing."""
    source = "\n".join(path.read_text() for path in INTEGRATIONS.rglob("*.py"))
    words = set(re.findall(r"\w+", source)) | {"__init__"}
    unused = [line for line in sorted(lines()) if line.rsplit(".", 1)[-1] not in words]
    assert [line for line in unused if line not in UNNAMED] == []


def test_every_module_the_plugin_patches_by_name_is_there() -> None:
    named = {name for _, tree in modules() for name in imported(tree) if name.startswith("vllm.v1.")}
    assert {"vllm.v1.sample.sampler", "vllm.v1.worker.gpu.sample.sampler"} <= named
    assert {name for name in named if not is_module(name) and name not in lines()} == set()


def test_a_changed_signature_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "verl.trainer.ppo.v1.trainer_base"
    trainer = importlib.import_module(module).PPOTrainer
    contract = {module: CONTRACT[module]}

    def renamed_parameter(self: object, batch: object, numbers: object) -> object:
        return batch

    monkeypatch.setattr(trainer, "_compute_advantage", renamed_parameter)
    monkeypatch.delattr(trainer, "_validate")
    assert breaches(contract) == [
        f"{module}.PPOTrainer._compute_advantage was (self, batch, metrics) and is (self, batch, numbers)",
        f"{module}.PPOTrainer._validate is gone: PPOTrainer has no _validate",
    ]


def test_a_missing_field_and_attribute_are_reported() -> None:
    contract: dict[str, dict[str, Expected]] = {
        "verl.workers.config": {"ActorConfig": {"clip_ratio_low", "clip_ratio_lower_still"}},
        "verl.trainer.ppo.v1.replay_buffer": {
            "ReplayBuffer.refill_fn": "attribute",
            "ReplayBuffer.refill_function": "attribute",
        },
        "verl.no_such_module": {"thing": "()"},
    }
    assert breaches(contract) == [
        f"verl.workers.config.ActorConfig was {contract['verl.workers.config']['ActorConfig']} and is {{'clip_ratio_low'}}",
        "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.refill_function was attribute and is nothing",
        "verl.no_such_module.thing is gone: No module named 'verl.no_such_module'",
    ]


def test_a_use_without_a_line_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk sees an import inside a function, an attribute of an imported module, an override and an attribute on
    self.
    """
    (tmp_path / "fresh_use.py").write_text(
        textwrap.dedent("""
        import transfer_queue as tq
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        class Fresh(PPOTrainer):
            def _balance_batch(self, batch, metrics):
                return self._update_critic(batch, self.checkpoint_manager)

        def late():
            from verl.utils.tracking import Tracking
            return tq.kv_put
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    tree = ast.parse((tmp_path / "fresh_use.py").read_text())
    try:
        seen = {*imported(tree), *inherited(importlib.import_module("fresh_use"), tree)}
    finally:
        sys.modules.pop("fresh_use", None)
    trainer = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
    assert seen == {
        trainer,
        *(f"{trainer}.{name}" for name in ("_balance_batch", "_update_critic", "checkpoint_manager")),
        "verl.utils.tracking.Tracking",
        "transfer_queue.kv_put",
    }


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_our_methods_come_first_in_every_trainer(mode: str) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from gtpo_verl.integrations.trainer import RunTrainer, trainer_class

    trainer, ours = trainer_class(mode), RunTrainer.__mro__[: RunTrainer.__mro__.index(PPOTrainer)]
    assert len(ours) == 3
    for name in {name for layer in ours for name, value in vars(layer).items() if inspect.isfunction(value)}:
        assert getattr(trainer, name) is getattr(RunTrainer, name), name


def test_a_ray_actor_class_tells_what_it_wraps() -> None:
    """`RunTrainer._init_resource_pool_mgr` takes verl's workers out of their actor classes this way."""
    import ray

    class Worker:
        pass

    assert ray.remote(Worker).__ray_actor_class__ is Worker


def test_both_engines_save_hugging_face_weights_where_they_are_looked_for() -> None:
    from verl.model_merger.base_model_merger import _default_hf_model_config_path

    from gtpo_verl.runs.directory import HF_WEIGHTS

    found = (_default_hf_model_config_path(engine, "actor") for engine in ("fsdp", "megatron"))
    assert tuple(map(Path, found)) == HF_WEIGHTS
