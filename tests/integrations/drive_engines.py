"""One batch through verl's FSDP engine and its Megatron engine, in as many processes as a layout has ranks.

test_megatron.py calls :func:`main` in a process of its own, in the environment of megatron_harness.py: as an imported
module, for Megatron's checkpoints start a process that imports the main one again. Each layout's results become
``DIRECTORY/LAYOUT.pt``. Either engine loads a small random Qwen2 from the same files, and
everything is verl's, Megatron-Core's and Megatron-Bridge's own except for what tests/support/megatron_cpu/ changes.

For every layout and algorithm it saves: weights, entropies and log-probs; losses, metrics and gradients of the batch in
micro-batches of several sizes; then three updates. For one algorithm also what a checkpoint gives back.
"""

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import verl.models.mcore.bridge  # noqa: F401  (before processes are forked; loads the plugin, too)
import yaml
from megatron.core import parallel_state as mpu
from megatron_harness import ACTOR, LAYOUTS, Layout
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from gtpo_verl.config import compose_config
from gtpo_verl.tasks.model import build_model, build_tokenizer, save

yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc, assignment]  # as in tests/conftest.py

TEMPERATURE = 0.7
# of each row; the eighth response is empty of tokens that count, as verl's filler rows are
PROMPTS = (3, 5, 2, 4, 3, 2, 6, 3)
RESPONSES = (5, 1, 7, 4, 6, 3, 2, 1)
ALGORITHMS = ("dapo", "gtpo", "grpo_s")
MICRO_BATCHES = (1, 2, 4)  # rows in a micro-batch
UPDATES = 3
CHECKPOINTED = "gtpo"  # the algorithm that also saves, loads and repeats


def write_model(directory: Path, tied: bool) -> None:
    """A random Qwen2 with two layers, four heads, two groups of queries, and a bias in the three projections."""
    tokenizer = build_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    model = build_model(len(tokenizer), seed=0, tie_word_embeddings=tied, initializer_range=0.2, **shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which are all equal otherwise
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save(model, tokenizer, directory)


def batches(directory: Path) -> dict[str, TensorDict]:
    """For every algorithm the batch as verl's workers get it from TransferQueue: one jagged row a response."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(2, model.config.vocab_size, (length,), generator=generator)

    prompts, responses = [tokens(length) for length in PROMPTS], [tokens(length) for length in RESPONSES]
    inputs = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    counts = [torch.ones(length, dtype=torch.int64) for length in RESPONSES]
    counts[2][1:3] = 0  # a tool's tokens inside a response
    counts[-1][:] = 0
    old = []
    for prompt, response, row, shift in zip(prompts, responses, inputs, (0.4, -0.4) * 4, strict=True):
        with torch.no_grad():
            logits = model(row[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        # far enough from the policy, in single tokens and in whole responses, that the clip ranges of all losses bite
        old.append(log_probs + shift + 0.3 * torch.randn(len(response), generator=generator))
    columns = {
        "input_ids": inputs,
        "position_ids": [torch.arange(len(row)) for row in inputs],
        "prompts": prompts,
        "responses": responses,
        "response_mask": counts,
        "loss_mask": counts,
        "old_log_probs": old,
    }
    found = {}
    for algorithm in ALGORITHMS:
        sizes = RESPONSES if algorithm == "gtpo" else (1,) * len(RESPONSES)
        advantages = [torch.randn(size, generator=generator) for size in sizes]
        spread = [(one.expand(len(count)) * count).clone() for one, count in zip(advantages, counts, strict=True)]
        jagged = {name: _jagged(rows) for name, rows in (columns | {"advantages": spread}).items()}
        found[algorithm] = TensorDict(jagged, batch_size=[len(PROMPTS)])
    return found


def _jagged(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


@cache
def compose(backend: str, algorithm: str) -> DictConfig:
    """A run's configuration, as ``gtpo-verl train`` composes it."""
    return compose_config(
        [
            *(f"algo={algorithm}", "setting=quickstart", f"backend={backend}"),
            "hardware=cpu" if backend == "fsdp" else "hardware=gpu",  # of FSDP's settings Megatron's engine has none
            *(f"{ACTOR}.optim.lr=2e-4", f"{ACTOR}.optim.total_training_steps=10"),
        ]
    )


def section(layout: Layout, algorithm: str, model: Path) -> DictConfig:
    """The section ``actor_rollout_ref`` of a layout."""
    found = copy.deepcopy(compose(layout.backend, algorithm).actor_rollout_ref)
    found.model.path = str(model)
    found.actor.rollout_n = 1
    if layout.backend == "fsdp":
        found.model.use_remove_padding = False  # as a run of this model would have it
    if layout.backend == "megatron":
        for key, value in layout.settings().items():
            OmegaConf.update(found.actor.megatron, key, value, force_add=True)
    return found


class Actor:
    """One of verl's engines with the actor's loss."""

    def __init__(self, layout: Layout, algorithm: str, path: Path) -> None:
        config = section(layout, algorithm, path)
        self.config = omega_conf_to_dataclass(config.actor)
        self.packed = layout.packed and layout.backend == "megatron"
        self.config.engine.use_remove_padding = self.packed
        model = omega_conf_to_dataclass(config.model, dataclass_type=HFModelConfig)
        kind = MegatronEngineWithLMHead if layout.backend == "megatron" else FSDPEngineWithLMHead
        self.engine = kind(model, self.config.engine, self.config.optim, self.config.checkpoint)
        self.engine.initialize()

    @property
    def answers(self) -> bool:
        """Whether this rank has outputs of the model and is the first of its data-parallel group."""
        return self.engine.is_mp_src_rank_with_outputs() and self.engine.get_data_parallel_rank() == 0

    def rows(self, batch: TensorDict, micro_batch: int) -> TensorDict:
        """This rank's rows, with what `TrainingWorker` and the trainer write beside the columns of a batch."""
        ranks, rank = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        data = tu.chunk_tensordict(batch, ranks)[rank].clone()
        tu.assign_non_tensor(
            data,
            temperature=TEMPERATURE,
            calculate_entropy=True,  # its share in the loss is entropy_coeff, 0; its metric is compared
            global_batch_size=len(PROMPTS),
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=min(micro_batch, len(data)),
            use_remove_padding=self.packed,
            use_fused_kernels=False,
        )
        return data

    def loss(self) -> Any:
        return partial(ppo_loss, config=self.config)

    def step(self, batch: TensorDict, micro_batch: int) -> dict[str, Any]:
        """Loss, metrics and gradients of the batch: what `TrainingWorker.train_batch` does but for the update."""
        data = self.rows(batch, micro_batch)
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            output = self.engine.forward_backward_batch(data, self.loss())
            result = {"gradients": self.gradients()}
        return result | self.reported(output)

    def update(self, batch: TensorDict, times: int) -> dict[str, Any]:
        """Updates with the same batch: loss, metrics and norm of gradients of each, then policy and weights."""
        reported = []
        for _ in range(times):
            with self.engine.train_mode():
                output = self.engine.train_batch(self.rows(batch, 2), self.loss())
                self.engine.lr_scheduler_step()
            reported.append(self.reported(output))
        return {"updates": reported, "policy": self.policy(batch), "weights": self.weights()}

    def reported(self, output: dict[str, Any]) -> dict[str, Any]:
        """Loss and metrics as the trainer gets them; nothing on a rank without outputs."""
        if not self.engine.is_mp_src_rank_with_outputs():
            return {}
        output.pop("model_output")
        worker = SimpleNamespace(engine=self.engine, device_name="cpu", flops_counter=None)
        result = TrainingWorker._postprocess_output(
            worker, output, global_token_num=None, delta_time=1.0, forward_only=False, images_seqlens=None
        )
        metrics = tu.get(result, "metrics")
        averaged = {  # as `TrainingWorker.train_mini_batch` does
            name: float(Metric.aggregate_dp(values)) for name, values in metrics.items() if isinstance(values, list)
        }
        return {"loss": metrics["loss"], "norm": metrics.get("grad_norm"), "metrics": averaged}

    def policy(self, batch: TensorDict) -> torch.Tensor | None:
        """Entropies and log-probs (2, response tokens) of this rank's rows, from the pass that precedes an update."""
        data = self.rows(batch, 2)
        with self.engine.eval_mode(), torch.no_grad():
            output = self.engine.forward_backward_batch(data, None, forward_only=True).get("model_output")
        if not output:
            return None
        parts = [response_from_nested(output[name], data["response_mask"]) for name in ("entropy", "log_probs")]
        return torch.stack([part.values() for part in parts])

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights in Hugging Face's names, as vLLM would get them."""
        parameters, _ = self.engine.get_per_tensor_param()
        return {name: _full(value).clone() for name, value in parameters}

    def gradients(self) -> dict[str, torch.Tensor]:
        """All gradients in Hugging Face's names.

        Megatron's are reduced into shards of its buffers; put together and in the place of the weights for a moment,
        they are converted as the weights are.
        """
        if isinstance(self.engine, FSDPEngineWithLMHead):
            return {name: _full(weight.grad).clone() for name, weight in self.engine.module.named_parameters()}
        parameters = []
        for chunk in self.engine.module:
            for buffer in chunk.buffers:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, share, group=group)
            parameters += chunk.module.parameters()
        weights = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.main_grad
        converted = self.weights()
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
        return converted


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def checkpointed(make: Callable[[], Actor], batch: TensorDict, folder: Path) -> dict[str, Any]:
    """Save after an update, make two more, and let a new engine load and make them again."""
    one = make()
    one.update(batch, 1)
    one.engine.save_checkpoint(str(folder), global_step=1)
    exported = AutoModelForCausalLM.from_pretrained(folder / "model" / "huggingface", dtype=torch.float32)
    result: dict[str, Any] = {"saved": one.weights(), "exported": exported.state_dict()}
    result["went on"] = one.update(batch, 2)
    other = make()
    other.engine.load_checkpoint(str(folder), del_local_after_load=False)
    result["loaded"] = other.weights()
    result["resumed"] = other.update(batch, 2)
    return result


def layout_results(layout: Layout, model: Path, folder: Path) -> Iterator[tuple[tuple[str, Any], Any]]:
    """(algorithm, what) and the result, for a layout of this process's ranks."""
    for algorithm, batch in batches(model).items():
        make = partial(Actor, layout, algorithm, model)
        actor = make()
        yield (algorithm, "weights"), actor.weights()
        yield (algorithm, "policy"), actor.policy(batch)
        for micro_batch in MICRO_BATCHES:
            yield (algorithm, micro_batch), actor.step(batch, micro_batch)
        yield (algorithm, "updated"), actor.update(batch, UPDATES)
        if algorithm == CHECKPOINTED and layout.backend == "megatron":
            yield (algorithm, "checkpoint"), checkpointed(make, batch, folder)
        yield (algorithm, "answers"), actor.answers


def run_rank(rank: int, ranks: int, meeting: str, names: list[str], out: Path) -> None:
    """Every layout of this number of ranks; the rank that has a layout's outputs saves its results."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", meeting, rank=rank, world_size=ranks)
    for name in names:
        layout = LAYOUTS[name]
        results = dict(layout_results(layout, model_path(out, layout), out / name))
        if results[ALGORITHMS[0], "answers"]:
            torch.save(results, out / f"{name}.pt")
        mpu.destroy_model_parallel()
        dist.barrier()
    dist.destroy_process_group()


def model_path(out: Path, layout: Layout) -> Path:
    return out / ("model-tied" if layout.tied else "model")


def main(directory: str, *names: str) -> None:
    out, layouts = Path(directory), [LAYOUTS[name] for name in names]
    for layout in layouts:
        write_model(model_path(out, layout), layout.tied)
        for algorithm in ALGORITHMS:
            compose(layout.backend, algorithm)  # here, once for all processes
    for ranks in sorted({layout.ranks for layout in layouts}):
        own = [name for name in names if LAYOUTS[name].ranks == ranks]
        meeting = f"file://{tempfile.mkdtemp(dir=out)}/ranks"  # a free port may be taken before they open it
        # forked, so that the imports above are paid for once
        mp.start_processes(run_rank, (ranks, meeting, own, out), nprocs=ranks, start_method="fork")
