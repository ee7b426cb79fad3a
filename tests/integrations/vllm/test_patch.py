"""What the patch does to vLLM's samplers: sampled tokens gain an entropy, everything else stays as it was."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import ENV_FLAG, codec, kernels, patch, plugin
from gtpo_verl.versions import VLLM_TESTED


def sample(sampler, logits, temperature):
    """vLLM's own sampling step for rows of one temperature each; returns its LogprobsTensors."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    rows = len(logits)
    metadata = SamplingMetadata(
        temperature=torch.tensor(temperature),
        all_greedy=False,
        all_random=min(temperature) > 0,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[[] for _ in range(rows)],
        spec_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return sampler(logits.clone(), metadata).logprobs_tensors


@pytest.mark.slow  # imports the engine
def test_v1_sampled_tokens_carry_the_entropy_at_their_temperature(patched):
    logits = 4 * torch.randn(3, 1000)
    logits[:, 900:] = -torch.inf
    temperature = [0.6, 1.0, 0.0]
    tensors = sample(patched(logprobs_mode="processed_logprobs"), logits, temperature)
    ranks, entropies = codec.unpack(tensors.selected_token_ranks.tolist())
    log_probs = (logits.double() / torch.tensor([0.6, 1.0, 1.0])[:, None]).log_softmax(-1)
    expected = torch.special.entr(log_probs.exp()).sum(-1)
    torch.testing.assert_close(torch.from_numpy(entropies).double(), expected, atol=2e-6, rtol=0)
    chosen = log_probs.gather(-1, tensors.logprob_token_ids[:, :1].long())
    torch.testing.assert_close(tensors.logprobs.double(), chosen, atol=2e-6, rtol=0)
    assert ranks.tolist() == (log_probs >= chosen).sum(-1).tolist()


def test_v1_prompt_tokens_keep_plain_ranks(patched):
    logprobs = torch.randn(5, 100).log_softmax(-1)
    tensors = patched.gather_logprobs(logprobs, 1, torch.arange(5))
    assert tensors.selected_token_ranks.max() <= 100


def test_v1_log_probs_and_ids_are_untouched(patched):
    logprobs = torch.randn(5, 100).log_softmax(-1)
    plain = patched.gather_logprobs(logprobs, 2, torch.arange(5))
    token = patch._sampling.set(True)
    packed = patched.gather_logprobs(logprobs, 2, torch.arange(5))
    patch._sampling.reset(token)
    assert torch.equal(packed.logprobs, plain.logprobs)
    assert torch.equal(packed.logprob_token_ids, plain.logprob_token_ids)
    assert codec.unpack(packed.selected_token_ranks.tolist())[0].tolist() == plain.selected_token_ranks.tolist()


def test_an_entropy_costs_no_byte_between_engine_and_front_end(patched):
    """What the patched sampler returns for a token is as long on the wire as what vLLM's own returns."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackEncoder

    def size(tensors):
        output = EngineCoreOutput(request_id="r", new_token_ids=[5], new_logprobs=tensors.tolists())
        return sum(len(part) for part in MsgpackEncoder().encode(output))

    logprobs = torch.randn(1, 100).log_softmax(-1)
    plain = patched.gather_logprobs(logprobs, 0, torch.tensor([5]))
    token = patch._sampling.set(True)
    packed = patched.gather_logprobs(logprobs, 0, torch.tensor([5]))
    patch._sampling.reset(token)
    assert not torch.equal(packed.selected_token_ranks, plain.selected_token_ranks)
    assert size(packed) == size(plain)


def test_installing_twice_changes_nothing(patched):
    def installed():
        v2 = [vars(importlib.import_module(name)) for name in patch._V2_MODULES]
        return [
            patched.gather_logprobs,
            patched.forward,
            *(module[name] for module in v2 for name in patch._V2_NAMES if name in module),
        ]

    before = installed()
    patch.install()
    assert all(now is then for now, then in zip(installed(), before, strict=True))


def test_v2_uses_the_fused_kernel_for_samples_and_vllms_own_for_prompts(patched):
    for module_name in patch._V2_MODULES:
        module = importlib.import_module(module_name)
        name = next(name for name in patch._V2_NAMES if hasattr(module, name))
        assert isinstance(getattr(module, name).__globals__["_ranks_kernel"], kernels.RankAndEntropyKernel)
    prompts = importlib.import_module("vllm.v1.worker.gpu.sample.prompt_logprob")
    name = next(name for name in patch._V2_NAMES if hasattr(prompts, name))
    own = getattr(prompts, name).__globals__["_ranks_kernel"]
    assert not isinstance(own, kernels.RankAndEntropyKernel)


@pytest.mark.parametrize("version", ["0.23.0", "0.3.1"])
def test_an_older_version_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UserError, match=f"vLLM {version} is installed.*at least {VLLM_TESTED[0]}"):
        patch.install()


@pytest.mark.parametrize("version", ["0.29.1", "0.33.0", "1.0.0"])
def test_a_newer_version_that_can_be_patched_is_not_refused(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    assert patch.check_vllm_version() == version


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("vllm.v1.sample.sampler", ["Sampler"]),
        ("vllm.v1.sample.rejection_sampler", ["RejectionSampler"]),
        *((module, patch._V2_NAMES) for module in patch._V2_MODULES),
    ],
)
def test_a_missing_name_is_an_error_that_says_so(monkeypatch, patched, module, names):
    monkeypatch.delattr(patched, patch._MARK)
    for name in names:
        monkeypatch.delattr(importlib.import_module(module), name, raising=False)
    with pytest.raises(UserError, match=rf"vLLM {vllm.__version__} cannot be patched .*{module} has no {names[0]}"):
        patch.install()


def test_a_rank_kernel_with_other_arguments_is_refused(monkeypatch):
    def ranks_kernel(output, logits):
        raise AssertionError

    def scores():
        return _ranks_kernel  # noqa: F821

    monkeypatch.setitem(scores.__globals__, "_ranks_kernel", ranks_kernel)
    with pytest.raises(UserError, match="_ranks_kernel takes output, logits"):
        patch._with_fused_ranks(scores)


@pytest.mark.parametrize("value", [None, "0"])
def test_the_entry_point_does_nothing_unless_asked(monkeypatch, value):
    monkeypatch.delenv(ENV_FLAG, raising=False)
    if value is not None:
        monkeypatch.setenv(ENV_FLAG, value)
    monkeypatch.setattr(patch, "install", lambda: pytest.fail("installed"))
    plugin.register()


def test_the_entry_point_lets_errors_through(monkeypatch):
    monkeypatch.setenv(ENV_FLAG, "1")
    monkeypatch.setattr(vllm, "__version__", "0.1.0")
    with pytest.raises(UserError, match=r"vLLM 0\.1\.0"):
        plugin.register()


def test_the_package_declares_the_entry_point():
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="gtpo_verl")
    assert entry.load() is plugin.register


def test_another_vllm_than_those_supported_gets_no_environment():
    script = Path(__file__).with_name("other_version.py")
    done = subprocess.run([sys.executable, script, "0.23.0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "vLLM 0.23.0 is older than 0.24, the oldest that is supported" in done.stderr
