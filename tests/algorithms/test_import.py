"""The core needs torch and the standard library, nothing of the training stack."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"verl", "vllm", "ray", "hydra", "omegaconf", "tensordict", "transformers",
            "pandas"}: raise ImportError(f"{name} is not available to gtpo_verl.algorithms")

sys.meta_path.insert(0, Wall())
import torch
from gtpo_verl.algorithms import GTPOConfig, gtpo_advantages
import gtpo_verl.algorithms.losses
ones = torch.ones(2, 3)
out = gtpo_advantages(ones, torch.tensor([True, False]), ones.bool(), torch.tensor([0, 0]), GTPOConfig())
assert out.advantages[0, 0] > 0 > out.advantages[1, 0]
"""


@pytest.mark.slow
def test_the_algorithms_need_torch_alone():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
