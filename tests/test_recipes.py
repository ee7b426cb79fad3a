"""Recipes and launch scripts: what they call composes, plans without an error, and is what their README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_verl.commands.plan import preflight_findings
from gtpo_verl.config import compose_config, prepare
from gtpo_verl.planning.plan import make_plan

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "recipe").glob("*.sh"))
LADDER = "dapo_ladder_32b"


def call(script: str, *words: str, tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **variables}
    return subprocess.run(["bash", str(ROOT / script), *words], capture_output=True, text=True, env=environment)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """`ray` and `gtpo-verl` that print what they are called with: no cluster is submitted to here."""
    for name in ("ray", "gtpo-verl"):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\"\n")
        tool.chmod(0o755)
    return tmp_path


def overrides_of(recipe: str, tools: Path, *words: str) -> list[str]:
    first = ("4_soft_overlong",) if recipe == LADDER else ()
    done = call(f"recipe/{recipe}.sh", *first, *words, tools=tools)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    if printed[0] == "ray":
        assert printed[:4] == ["ray", "job", "submit", "--address"]
        assert printed[5:9] == ["--", "python", "-m", "gtpo_verl.train"]
        return printed[9:]
    assert printed[:3] == ["gtpo-verl", "train", "trainer.nnodes=1"]
    return printed[3:]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_a_recipe_composes_and_plans_without_an_error(recipe: str, tools: Path) -> None:
    overrides = overrides_of(recipe, tools)
    assert [word.partition("=")[0] for word in overrides] == ["setting", "algo", "verifier"]
    config = compose_config(overrides)
    prepare(config, overrides)
    plan = make_plan(config, overrides, preflight=preflight_findings(config))
    assert plan.errors == []
    gpus = {"small": 8, "gpu": 1}.get(recipe.rsplit("_", 1)[-1], 128 if "paper" in recipe or recipe == LADDER else 64)
    assert plan.parallel.gpus == gpus


def test_more_overrides_go_through_as_they_are(tools: Path) -> None:
    words = ["data.train_files=/a path/x.parquet", "trainer.logger=[console,wandb]"]
    for recipe in ("gtpo_32b", "gtpo_small", LADDER):
        assert overrides_of(recipe, tools, *words)[-2:] == words


@pytest.mark.parametrize("recipe", [name for name in RECIPES if re.search(r"_(7|32)b$", name)])
def test_published_figures_of_a_recipe_are_those_of_the_table(recipe: str) -> None:
    header = (ROOT / "recipe" / f"{recipe}.sh").read_text().splitlines()[1:3]
    table = (ROOT / "recipe" / "README.md").read_text()
    figures = re.findall(r"\d+\.\d+ / \d+\.\d+ / \d+\.\d+", " ".join(header))
    assert figures or recipe in (LADDER, "dapo_paper_32b")
    for figure in figures:
        assert figure in table
    assert f"`{recipe}" in table


@pytest.mark.slow
def test_a_one_node_recipe_prints_the_configuration_that_it_would_run() -> None:
    """With the real command behind it: `--cfg` stops before anything starts."""
    done = call("recipe/smoke_one_gpu.sh", "--cfg", tools=Path(sys.executable).parent)
    assert done.returncode == 0, done.stderr
    assert "path: Qwen/Qwen2.5-0.5B" in done.stdout
    assert "loss_mode: gtpo" in done.stdout


def test_ray_nodes(tools: Path) -> None:
    head = call("scripts/ray_node.sh", "head", tools=tools).stdout.split()
    assert head[:3] == ["ray", "start", "--head"]
    worker = call("scripts/ray_node.sh", "worker", "10.0.0.1", tools=tools).stdout.split()
    assert worker[:4] == ["ray", "start", "--address=10.0.0.1:6379", "--block"]
    for words in ([], ["worker"], ["head", "10.0.0.1"]):
        wrong = call("scripts/ray_node.sh", *words, tools=tools)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "usage:" in wrong.stderr


def test_a_node_without_a_token_is_told_how_to_get_one(tmp_path: Path) -> None:
    tool = tmp_path / "ray"
    tool.write_text('#!/bin/sh\n[ "$1" = start ] && echo started; [ "$*" = "get-auth-token --generate" ]\n')
    tool.chmod(0o755)
    assert call("scripts/ray_node.sh", "head", tools=tmp_path).stdout == "started\n"
    done = call("scripts/ray_node.sh", "worker", "10.0.0.1", tools=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "copy ~/.ray/auth_token from the head" in done.stderr
    open_network = call("scripts/ray_node.sh", "worker", "10.0.0.1", tools=tmp_path, RAY_AUTH_MODE="disabled")
    assert open_network.stdout == "started\n"


@pytest.mark.parametrize("script", ["launch_one_node.sh", "launch_ray_cluster.sh", "ray_node.sh"])
def test_an_allocator_with_which_vllm_cannot_sleep_is_refused(script: str, tools: Path) -> None:
    done = call(f"scripts/{script}", "head", tools=tools, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unset it" in done.stderr
