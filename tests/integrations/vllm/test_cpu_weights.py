"""vLLM's linear layers on the CPU keep a weight that can be loaded again."""

import pytest
import torch
import vllm
from vllm import _custom_ops
from vllm.model_executor.layers import utils

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm.worker_extension import keep_linear_weights


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(_custom_ops, "_supports_onednn", _custom_ops._supports_onednn)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", utils.check_cpu_sgl_kernel)


def loaded_layer():
    layer = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


def test_without_it_the_weight_is_gone():
    assert loaded_layer().weight.numel() == 0  # the day this fails, the module is no longer needed


def test_with_it_an_updated_weight_is_used_at_once():
    keep_linear_weights()
    layer = loaded_layer()
    layer.weight.fill_(2.0)
    assert torch.equal(utils.cpu_unquantized_gemm(layer, torch.ones(1, 64), layer.weight), torch.full((1, 32), 128.0))


@pytest.mark.parametrize(("owner", "name"), [(_custom_ops, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")])
def test_a_vllm_that_packs_otherwise_is_refused(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(UserError, match=rf"vLLM {vllm.__version__} on the CPU has no .*{name}"):
        keep_linear_weights()
