"""Runs one vLLM engine in a process of its own: ``python run_engine.py request.json answer.json``.

The request names the engine's arguments and its batches. The patch is installed by vLLM itself, through the entry point
of the package and GTPO_VERL_ROLLOUT_ENTROPY=1.
"""

import json
import sys
from pathlib import Path
from typing import Any


def runner_of(worker: Any) -> str:
    """V1 or V2: vLLM's two model runners have CPU versions derived from them."""
    modules = [base.__module__ for base in type(worker.model_runner).__mro__]
    return "V2" if "vllm.v1.worker.gpu.model_runner" in modules else "V1"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from gtpo_verl.integrations.vllm import codec

    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, dtype="float32", disable_log_stats=False, **request["engine"]
    )
    responses = []
    for batch in request["batches"]:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        params = [SamplingParams(detokenize=False, logprobs=0, ignore_eos=True, **each) for each in batch["params"]]
        for prompt, output in zip(batch["prompts"], llm.generate(prompts, params, use_tqdm=False), strict=True):
            completion = output.outputs[0]
            ranks, entropies = codec.unpack(codec.packed_words(completion.token_ids, completion.logprobs))
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            response = {
                "prompt": prompt,
                "tokens": list(completion.token_ids),
                "ranks": ranks.tolist(),
                "entropies": entropies.tolist(),
                "log_probs": [entry[token].logprob for token, entry in pairs],
            }
            if output.prompt_logprobs is not None:
                rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
                response["prompt_ranks"] = [entry[token].rank for token, entry in rows]
            responses.append(response)
    runners = llm.collective_rpc(runner_of)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {"responses": responses, "runners": runners, "metrics": counters}


if __name__ == "__main__":
    request_file, answer_file = map(Path, sys.argv[1:])
    answer_file.write_text(json.dumps(answer(json.loads(request_file.read_text()))))
