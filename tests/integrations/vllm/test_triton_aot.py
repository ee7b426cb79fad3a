"""The Triton kernel compiles for the GPUs that train 32B models, without spilling a register; no GPU needed."""

import re
import subprocess

import pytest
import triton


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiles_without_spills(dtype, capability, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from gtpo_verl.integrations.vllm import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = triton_kernels.rank_entropy_kernel
    pointers = {"output_ptr": "*i64", "x_ptr": f"*{dtype}", "token_ids_ptr": "*i64"}
    types = pointers | {"x_stride": "i32", "vocab_size": "i32", "BLOCK_SIZE": "constexpr"}
    source = ASTSource(kernel, {argument: types[argument] for argument in kernel.arg_names}, {"BLOCK_SIZE": 8192})
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": triton_kernels.NUM_WARPS})
    assert compiled.asm["cubin"]

    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    target = re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)
    report = subprocess.run(
        [get_ptxas(capability).path, "-v", "--gpu-name", target, ptx, "-o", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    assert int(re.search(r"Used (\d+) registers", report).group(1)) <= 128, report
