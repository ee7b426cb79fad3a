"""A tiny policy with wide entropies, vLLM engines that serve it, and the truth from transformers in float64."""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

HERE = Path(__file__).parent
# Any Python that has gtpo_verl and a vLLM: how other versions of vLLM than the one beside verl are tested.
ENGINE_PYTHON = os.environ.get("GTPO_VERL_TEST_ENGINE_PYTHON", sys.executable)
VOCABULARY = 512
# The first vLLM whose runner speculates with a draft model on a CPU. V1 in 0.24 calls its sampling kernel with an
# argument that it does not take, and in 0.30 asks for the parameters of a Triton kernel, which a CPU does not have; V2
# has had only drafters that are trained for their model before 0.32.
DRAFT_MODEL_ON_CPU_SINCE = {"V1": (0, 28), "V2": (0, 32)}
NO_DRAFT_MODEL_ON_CPU = {("V1", (0, 30))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``speculating_runner`` once for each model runner that can, in the vLLM under test."""
    if "speculating_runner" not in metafunc.fixturenames:
        return
    script = "import importlib.metadata as m; print(m.version('vllm'))"
    version = subprocess.run([ENGINE_PYTHON, "-c", script], capture_output=True, text=True, check=True).stdout
    release = tuple(map(int, version.split(".")[:2]))
    runners = [
        runner
        for runner, since in DRAFT_MODEL_ON_CPU_SINCE.items()
        if release >= since and (runner, release) not in NO_DRAFT_MODEL_ON_CPU
    ]
    metafunc.parametrize("speculating_runner", runners)


def _save_policy(path: Path, seed: int, noise: float = 0.0) -> Path:
    """A random Qwen2 (2 layers, hidden 64, 2 heads of 32) in float32, its output weights scaled so that entropies span
    nats.

    The tokenizer has fewer ids than the model, so verl masks the tail with -inf in vLLM.
    """
    from gtpo_verl.tasks.model import build_model, build_tokenizer, save

    model = build_model(
        VOCABULARY,
        seed,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    draw = torch.Generator().manual_seed(1000 + seed)  # not the stream of which the weights were made
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=draw))
    save(model, build_tokenizer(), path)
    return path


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save_policy(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="session")
def other_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same shape, for weight updates."""
    return _save_policy(tmp_path_factory.mktemp("other_policy"), seed=1)


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that the policy sometimes agrees with."""
    return _save_policy(tmp_path_factory.mktemp("draft"), seed=0, noise=0.2)


class Truth(NamedTuple):
    """Teacher-forced, in float64, of a response of T tokens; (T,) each."""

    log_probs: torch.Tensor  # of the tokens
    entropies: torch.Tensor
    ranks: torch.Tensor
    variances: torch.Tensor  # of a sampled token's log-prob, whose expectation is minus the entropy


@pytest.fixture(scope="session")
def truth() -> Callable[..., Truth]:
    """What transformers says of a response under a policy."""
    from transformers import Qwen2ForCausalLM

    @functools.cache
    def load(policy: Path) -> Any:
        return (
            Qwen2ForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="eager").double().eval()
        )

    def truth(
        policy: Path, prompt: list[int], tokens: list[int], temperature: float, masked: Sequence[int] = ()
    ) -> Truth:
        with torch.no_grad():
            logits = load(policy)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits[:, list(masked)] = -torch.inf
        log_probs = (logits / temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(tokens)[:, None])
        probs = log_probs.exp()
        entropies = torch.special.entr(probs).sum(-1)
        squares = (probs * log_probs.masked_fill(probs == 0, 0.0).square()).sum(-1)
        return Truth(chosen[:, 0], entropies, (log_probs >= chosen).sum(-1), squares - entropies.square())

    return truth


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's V1 sampler with the patch installed, and vLLM restored afterwards."""
    from vllm.v1.sample import rejection_sampler as rejection
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from gtpo_verl.integrations.vllm import patch

    saved = ((Sampler, "forward"), (RejectionSampler, "_get_logprobs_tensors"), (rejection, "expand_batch_to_tokens"))
    for owner, name in saved:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(Sampler, "gather_logprobs", staticmethod(Sampler.gather_logprobs))
    monkeypatch.setattr(Sampler, patch._MARK, True, raising=False)
    monkeypatch.delattr(Sampler, patch._MARK)
    for module_name in patch._V2_MODULES:
        module = importlib.import_module(module_name)
        name = next(name for name in patch._V2_NAMES if hasattr(module, name))
        monkeypatch.setattr(module, name, getattr(module, name))
    patch.install()
    yield Sampler
    if hasattr(Sampler, patch._MARK):
        delattr(Sampler, patch._MARK)


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The Python whose vLLM is tested."""
    return ENGINE_PYTHON


@pytest.fixture(scope="session")
def v2_on_cpu() -> dict[str, str]:
    """The environment in which vLLM's Model Runner V2 runs without a GPU."""
    paths = [str(HERE / "interpreter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run a script of this folder on the vLLM under test: a request in JSON in, an answer out."""

    def ask(script: str, request: dict[str, Any], env: dict[str, str], timeout: float) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(Path(script).stem)
        request_file, answer_file = folder / "request.json", folder / "answer.json"
        request_file.write_text(json.dumps(request))
        common = {
            "GTPO_VERL_RUN": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the scripts send functions to the workers
        }
        process = subprocess.run(
            [ENGINE_PYTHON, str(HERE / script), str(request_file), str(answer_file)],
            env={**os.environ, **common, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert process.returncode == 0, process.stderr[-6000:]
        return json.loads(answer_file.read_text())

    return ask


@pytest.fixture(scope="session")
def run_engine(policy_dir: Path, ask: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Run batches through a vLLM engine in its own process."""

    def run(batches: list[dict[str, Any]], env: dict[str, str] | None = None, **engine: Any) -> dict[str, Any]:
        arguments = {
            "model": str(policy_dir),
            "max_model_len": 256,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": 512,  # else every worker fills a GiB with its KV cache
            **engine,
        }
        flags = {
            "GTPO_VERL_ROLLOUT_ENTROPY": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        return ask("run_engine.py", {"engine": arguments, "batches": batches}, {**flags, **(env or {})}, timeout=600)

    return run
