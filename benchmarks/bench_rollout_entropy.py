"""Cost of exact entropies in a vLLM rollout: tokens per second with them, with log-probs only, and with alternatives.

One engine serves a random model of Qwen2.5-0.5B's shape (vocabulary 151,936) and generates the same batch repeatedly;
the arms take turns within each round, so that other load on the machine affects all of them:

* ``logprobs``: the log-prob of the sampled token, as verl requests it;
* ``entropies``: the same request with this project's patch;
* ``top20``: the log-probs of the 20 most likely tokens, which only bound the entropy;
* ``full``: the log-probs of the whole vocabulary, which give it exactly; only a few tokens, because it is slow.

    OMP_NUM_THREADS=1 python benchmarks/bench_rollout_entropy.py --rounds 14 \\
        --output benchmarks/results/rollout-entropy-cpu.json
"""

import argparse
import importlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the patch is switched inside this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

FULL_BATCH = 16  # sequences in `full`: vLLM makes a Python object of every id of every token
LOGPROBS = {"logprobs": 0, "entropies": 0, "top20": 20, "full": -1}


def save_model(path: Path) -> None:
    """Qwen2.5-0.5B's shape with random weights, in bfloat16 on disk."""
    from gtpo_verl.tasks.model import build_model

    model = build_model(
        151_936,
        seed=0,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model.bfloat16().save_pretrained(path)


class Switch:
    """This project's patch of the samplers, on or off."""

    def __init__(self) -> None:
        from vllm.v1.sample.sampler import Sampler

        from gtpo_verl.integrations.vllm import patch

        modules = [importlib.import_module(name) for name in patch._V2_MODULES]
        places: list[tuple[Any, str]] = [(Sampler, "forward"), (Sampler, "gather_logprobs")]
        places += [(module, name) for module in modules for name in patch._V2_NAMES if hasattr(module, name)]
        plain = [vars(owner)[name] for owner, name in places]
        patch.install()
        patched = [vars(owner)[name] for owner, name in places]
        self.places, self.states = places, {True: patched, False: plain}

    def set(self, on: bool) -> None:
        for (owner, name), value in zip(self.places, self.states[on], strict=True):
            setattr(owner, name, value)


def measure(llm: Any, switch: Switch, arm: str, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds for one batch: wall-clock, and CPU time of this process, which other jobs affect less."""
    from vllm import SamplingParams

    from gtpo_verl.integrations.vllm import codec

    switch.set(arm == "entropies")
    params = SamplingParams(
        temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=LOGPROBS[arm], detokenize=False
    )
    start, start_cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    if arm == "entropies":
        for output in outputs:
            entropies = codec.completion_entropies(output.outputs[0].token_ids, output.outputs[0].logprobs)
            assert len(entropies) == tokens
    return time.perf_counter() - start, time.process_time() - start_cpu


def compare(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Speed of each arm against ``logprobs``, round by round: median and the 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    answer = {}
    for arm, values in seconds.items():
        ratios = [base / value for value, base in zip(values, seconds["logprobs"], strict=True)]
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        answer[arm] = {
            "median_seconds": statistics.median(values),
            "speed_against_logprobs": statistics.median(ratios),
            "low": medians[50],
            "high": medians[1949],
        }
    return answer


def _rounded(value: Any) -> Any:
    """Round floats to four decimals, recursively."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="sequences (default 16)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per sequence (default 16)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of all arms (default 10)")
    parser.add_argument("--full-rounds", type=int, default=10, help="rounds that also measure `full` (default 10)")
    parser.add_argument("--full-tokens", type=int, default=2, help="tokens per sequence in `full` (default 2)")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    options = parser.parse_args()

    import vllm
    from vllm import LLM

    switch = Switch()
    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 150_000) for _ in range(16)] for _ in range(options.batch)]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=512,
            max_logprobs=-1,
            logprobs_mode="processed_logprobs",
            enforce_eager=not torch.cuda.is_available(),
            enable_prefix_caching=False,
        )

    def rounds(arms: tuple[str, ...], count: int, tokens: int, batch: int | None = None) -> dict[str, Any]:
        clock: dict[str, list[float]] = {arm: [] for arm in arms}
        cpu: dict[str, list[float]] = {arm: [] for arm in arms}
        for index in range(count):
            for arm in arms if index % 2 == 0 else reversed(arms):
                on_clock, on_cpu = measure(llm, switch, arm, prompts[:batch], tokens)
                clock[arm].append(on_clock)
                cpu[arm].append(on_cpu)
            print(", ".join(f"{arm} {clock[arm][-1]:.2f} s ({cpu[arm][-1]:.2f})" for arm in arms), flush=True)
        return {"clock": compare(clock), "cpu": compare(cpu), "seconds": {"clock": clock, "cpu": cpu}}

    for arm in ("logprobs", "entropies", "top20"):  # compile before measuring
        measure(llm, switch, arm, prompts, 4)
    result = {
        "generation": rounds(("logprobs", "entropies", "top20"), options.rounds, options.tokens),
        # beside it the same short generation with log-probs only, because prefill weighs more there
        "full_vocabulary": rounds(("logprobs", "full"), options.full_rounds, options.full_tokens, FULL_BATCH),
        "setting": {
            "model": "Qwen2.5-0.5B's shape, random weights, vocabulary 151936",
            "batch": options.batch,
            "tokens": options.tokens,
            "full_tokens": options.full_tokens,
            "rounds": options.rounds,
            "threads": torch.get_num_threads(),
            "dtype": options.dtype,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
            "machine": platform.machine(),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "runner": llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)[0],
        },
    }
    text = json.dumps(_rounded(result), indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
