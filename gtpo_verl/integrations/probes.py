"""The checks that ``gtpo-verl doctor`` runs in a process: is the plugin loaded, and are vLLM's entropies correct?"""

import os
from pathlib import Path

from gtpo_verl.errors import UserError

ENTROPY_TOLERANCE = 1e-4  # nat, in fp32


def registered() -> str:
    """The names that the plugin has registered with verl in this process.

    Raises:
        UserError: one is missing.
    """
    import verl  # noqa: F401  (loads the plugin)

    from gtpo_verl.integrations import plugin

    return ", ".join(plugin.check_registered())


def save_probe_model(directory: Path, tensor_parallel: int = 1) -> None:
    """Save a small random Qwen2 whose entropies vary and are well below the maximum.

    Args:
        directory: where to.
        tensor_parallel: number of GPUs over which it can be split.
    """
    import torch

    from gtpo_verl.tasks.model import build_model

    heads = 4 * tensor_parallel
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "hidden_size": 32 * heads}
    model = build_model(vocabulary_size=256, seed=0, **shape)
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
    model.save_pretrained(directory)


def measure_entropies(model_path: str, tensor_parallel: int = 1) -> str:
    """Sample from a tiny model with vLLM and compare the entropies it returns with those of transformers in float64.

    Args:
        model_path: from :func:`save_probe_model`.
        tensor_parallel: number of GPUs over which vLLM splits it.

    Raises:
        UserError: there are no entropies, or wrong ones.
    """
    os.environ["GTPO_VERL_ROLLOUT_ENTROPY"] = "1"
    import torch
    import verl  # noqa: F401  (loads the plugin)
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from gtpo_verl.integrations.vllm.codec import completion_entropies
    from gtpo_verl.integrations.vllm.names import WORKER_EXTENSION

    engine = LLM(
        model=model_path,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        gpu_memory_utilization=0.1,
        tensor_parallel_size=tensor_parallel,
    )
    prompt = [5, 6, 7]
    sampling = SamplingParams(temperature=0.8, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    completion = engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling)[0].outputs[0]
    measured = torch.tensor(completion_entropies(completion.token_ids, completion.logprobs)).double()

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1] / 0.8
    expected = torch.distributions.Categorical(logits=logits).entropy()
    error = (measured - expected).abs().max().item()
    if error > ENTROPY_TOLERANCE:
        raise UserError(
            f"entropies from vLLM are off by {error:.1e} nat: report this with the output of `gtpo-verl doctor`."
        )
    return f"entropies of {len(measured)} tokens, {error:.0e} nat from float64"
