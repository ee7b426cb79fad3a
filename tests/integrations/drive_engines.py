"""One batch through verl's FSDP engine and its Megatron engine, in as many processes as the layout has ranks.

Run as ``python drive_engines.py OUT.pt`` by test_megatron.py. Everything between the logits and the reduced gradients
is verl's and Megatron-Core's own: packing, context-parallel split, vocabulary-parallel log-probs, ``ppo_loss``,
post-processing, pipeline schedule, gradient buffers, metrics. The model is a bigram, embedding and output layer without
attention: Megatron's attention over packed sequences needs Transformer Engine, and that needs a GPU.
"""

import copy
import os
import socket
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_COMPILE_DISABLE"] = (
    "1"  # one product and one sum of verl's are compiled: a C++ compiler run in every process
)

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import verl  # noqa: F401  (loads the plugin)
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.transformer import MegatronModule, TransformerConfig
from tensordict import TensorDict
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import CausalLMOutput
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from gtpo_verl.config import compose_config

VOCABULARY, HIDDEN, TEMPERATURE = 32, 16, 0.7
PROMPTS = (
    3,
    5,
    2,
    4,
    3,
    2,
    6,
    3,
)  # lengths; the eighth response is empty of tokens that count, as verl's filler rows are
RESPONSES = (5, 1, 7, 4, 6, 3, 2, 1)
ALGORITHMS = ("dapo", "gtpo", "grpo_s")
# backend, ranks, Megatron's parallel sizes; what is left of the ranks is data-parallel
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp dp1": ("fsdp", 1, {}),
    "fsdp dp2": ("fsdp", 2, {}),
    "megatron dp1": ("megatron", 1, {}),
    "megatron dp2": ("megatron", 2, {}),
    "megatron tp2": ("megatron", 2, {"tensor_model_parallel_size": 2}),
    "megatron cp2": ("megatron", 2, {"context_parallel_size": 2}),
    "megatron cp2 per token": ("megatron", 2, {"context_parallel_size": 2, "calculate_per_token_loss": True}),
    "megatron dp2 cp2": ("megatron", 4, {"context_parallel_size": 2}),
    "megatron dp2 cp2 per token": ("megatron", 4, {"context_parallel_size": 2, "calculate_per_token_loss": True}),
}
MICRO_BATCHES = (1, 2, 4)  # rows in a micro-batch


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "output": 0.5 * torch.randn(VOCABULARY, HIDDEN, generator=generator),
    }


def batch(algorithm: str) -> TensorDict:
    """The batch as verl's workers get it from TransferQueue: one jagged row a response."""
    generator = torch.Generator().manual_seed(1)

    def rows(lengths: tuple[int, ...], make: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(length) for length in lengths], layout=torch.jagged)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (length,), generator=generator)

    prompts, responses = rows(PROMPTS, tokens), rows(RESPONSES, tokens)
    input_ids = torch.nested.as_nested_tensor(
        [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)], layout=torch.jagged
    )
    counts = [torch.ones(length, dtype=torch.int64) for length in RESPONSES]
    counts[2][1:3] = 0  # a tool's tokens inside a response
    counts[-1][:] = 0
    shifts = torch.tensor([0.4, -0.4]).repeat(len(RESPONSES) // 2)
    mask = torch.nested.as_nested_tensor(counts, layout=torch.jagged)
    reference = torch.nn.functional.linear(weights()["embedding"], weights()["output"]) / TEMPERATURE
    log_probs = torch.log_softmax(reference, -1)
    old, advantages = [], []
    for prompt, response, valid, shift in zip(prompts.unbind(), responses.unbind(), counts, shifts, strict=True):
        context = torch.cat([prompt[-1:], response[:-1]])
        # far enough from the new policy, in single tokens and in whole responses, that the clip ranges of all losses
        # bite
        old.append(log_probs[context, response] + shift + 0.3 * torch.randn(len(response), generator=generator))
        size = len(response) if algorithm == "gtpo" else 1
        advantages.append(torch.randn(size, generator=generator).expand(len(response)).clone() * valid)
    return TensorDict(
        {
            "input_ids": input_ids,
            "position_ids": rows(tuple(input_ids.offsets().diff().tolist()), torch.arange),
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": torch.nested.as_nested_tensor(old, layout=torch.jagged),
            "advantages": torch.nested.as_nested_tensor(advantages, layout=torch.jagged),
        },
        batch_size=[len(PROMPTS)],
    )


class Bigram(torch.nn.Module):
    """The model as Hugging Face would have it, for FSDP: its logits depend on the token before alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(weights()["embedding"])
        self.output = torch.nn.Parameter(weights()["output"])

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.nn.functional.linear(self.embedding[input_ids], self.output))


class MegatronBigram(MegatronModule):
    """The same model of Megatron's own vocabulary-parallel layers."""

    pre_process = post_process = True
    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        build = {"config": config, "init_method": torch.nn.init.zeros_}
        self.embedding = tensor_parallel.VocabParallelEmbedding(VOCABULARY, HIDDEN, **build)
        self.output = tensor_parallel.ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, **build)
        rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        with torch.no_grad():
            for name, full in weights().items():
                getattr(self, name).weight.copy_(full.chunk(size)[rank])

    def set_input_tensor(self, tensor: Any) -> None:
        """Called by the schedule; the only stage of a pipeline gets nothing."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.output(self.embedding(input_ids))[0]


class OnCpu(TorchFunctionMode):
    """Megatron's schedule and gradient buffers ask for ``device="cuda"`` by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def fsdp_engine(actor: Any, model: Any) -> Any:
    engine = FSDPEngineWithLMHead(model, actor.engine, actor.optim, actor.checkpoint)
    engine.module = fully_shard(Bigram(), mesh=engine.device_mesh)
    engine._autocast_dtype = torch.float32  # what `_build_fsdp_module` derives from mixed_precision.param_dtype=fp32
    return engine


def megatron_engine(actor: Any, model: Any, sizes: dict[str, Any]) -> Any:
    engine = transformer_impl.MegatronEngineWithLMHead(model, actor.engine, actor.optim, actor.checkpoint)
    engine.tf_config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
        **sizes,
    )
    # The count is a view of the batch's offsets and is all-reduced in place: harmless where `.to(device)` copies it to
    # a GPU.
    count = engine._routed_num_tokens
    engine._routed_num_tokens = lambda data: count(data).clone()
    bigram = MegatronBigram(engine.tf_config)
    engine.module = [DistributedDataParallel(engine.tf_config, DistributedDataParallelConfig(), bigram)]
    return engine


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Full gradients by name, as the optimizer would get them."""
    if isinstance(engine, FSDPEngineWithLMHead):
        return {name: weight.grad.full_tensor() for name, weight in engine.module.named_parameters()}
    found = {}
    for name in weights():
        part = getattr(engine.module[0].module, name).weight.main_grad.contiguous()
        parts = [torch.empty_like(part) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        dist.all_gather(parts, part, group=mpu.get_tensor_model_parallel_group())
        found[name] = torch.cat(parts)
    return found


def assign(engine: Any, data: TensorDict, micro_batch: int) -> None:
    """What `TrainingWorker` and the trainer write beside the columns of a batch."""
    tu.assign_non_tensor(
        data,
        temperature=TEMPERATURE,
        calculate_entropy=True,  # its share in the loss is entropy_coeff, 0; its metric is compared
        global_batch_size=len(PROMPTS),
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=min(micro_batch, len(data)),
        use_remove_padding=isinstance(engine, transformer_impl.MegatronEngineWithLMHead),
        use_fused_kernels=False,
    )


def step(engine: Any, actor: Any, algorithm: str, micro_batch: int) -> dict[str, Any]:
    """Loss, metrics and gradients of the batch: what `TrainingWorker.train_batch` does but for the optimizer's step."""
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    data = tu.chunk_tensordict(batch(algorithm), ranks)[rank]
    assign(engine, data, micro_batch)
    if isinstance(engine, FSDPEngineWithLMHead):
        engine.module.zero_grad()
    else:
        engine.module[0].zero_grad_buffer()
    output = engine.forward_backward_batch(data, partial(ppo_loss, config=actor))
    output.pop("model_output")
    worker = SimpleNamespace(engine=engine, device_name="cpu", flops_counter=None)
    result = TrainingWorker._postprocess_output(
        worker, output, global_token_num=None, delta_time=1.0, forward_only=False, images_seqlens=None
    )
    metrics = {
        name: float(Metric.aggregate_dp(values))  # as `TrainingWorker.train_mini_batch` does
        for name, values in tu.get(result, "metrics").items()
        if isinstance(values, list)
    }
    return {"loss": tu.get(result, "metrics")["loss"], "metrics": metrics, "gradients": gradients(engine)}


def entropies(engine: Any, algorithm: str) -> torch.Tensor:
    """Entropies and log-probs (2, response tokens) of this rank's rows, from the pass that precedes the update."""
    data = tu.chunk_tensordict(batch(algorithm), engine.get_data_parallel_size())[engine.get_data_parallel_rank()]
    assign(engine, data, micro_batch=2)
    with torch.no_grad():
        output = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
    parts = [response_from_nested(output[name], data["response_mask"]) for name in ("entropy", "log_probs")]
    return torch.stack([part.values() for part in parts])


def run_rank(rank: int, ranks: int, port: int, configs: dict[tuple[str, str], Any], out: str) -> None:
    """Every layout of this number of ranks; rank 0 saves the results."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts its gradient buffers
    transformer_impl.set_random_seed = torch.manual_seed  # Megatron would seed CUDA's generators
    model = SimpleNamespace(
        use_remove_padding=False,
        lora_rank=0,
        model_type="language_model",
        mtp=SimpleNamespace(enable=False, enable_train=False),
        hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    results: dict[tuple[str, str, int | str], Any] = {}
    for layout, (backend, needed, sizes) in LAYOUTS.items():
        if needed != ranks:
            continue
        for algorithm in ALGORITHMS:
            section = copy.deepcopy(configs[backend, algorithm].actor_rollout_ref.actor)
            if backend == "megatron":
                section.megatron.update({key: size for key, size in sizes.items() if key.endswith("_size")})
            else:
                section.fsdp_config.use_torch_compile = False
            section.rollout_n = 1
            actor = omega_conf_to_dataclass(section)
            actor.engine.use_remove_padding = backend == "megatron"
            with OnCpu():
                engine = megatron_engine(actor, model, sizes) if backend == "megatron" else fsdp_engine(actor, model)
                for micro_batch in MICRO_BATCHES:
                    results[layout, algorithm, micro_batch] = step(engine, actor, algorithm, micro_batch)
                results[layout, algorithm, "entropies"] = entropies(engine, algorithm)
            mpu.destroy_model_parallel()
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(out: str) -> None:
    configs = {
        (backend, algorithm): compose_config([f"algo={algorithm}", f"backend={backend}", "hardware=gpu"])
        for backend in ("fsdp", "megatron")
        for algorithm in ALGORITHMS
    }
    results = {}
    for ranks in sorted({needed for _, needed, _ in LAYOUTS.values()}):
        part = f"{out}.{ranks}"
        # forked, so that the imports above are paid for once
        mp.start_processes(run_rank, (ranks, free_port(), configs, part), nprocs=ranks, start_method="fork")
        results |= torch.load(part)
    torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1])
