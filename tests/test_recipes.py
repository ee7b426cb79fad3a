"""Recipes and launch scripts: what they call composes, plans without an error, and is what their README says."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dotted import dotted
from waiting import wait_until

from gtpo_verl.algorithms import algorithm_of
from gtpo_verl.config import compose_config, prepare
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.problems import errors_of
from gtpo_verl.rules import stages
from gtpo_verl.rules.plan import problems
from gtpo_verl.versions import VERL_TESTED

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "recipe").glob("*_*.sh"))
PAIRED = {size: [f"{arm}_{size}" for arm in ("dapo", "gtpo", "grpo_s")] for size in ("small", "7b", "32b")}
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
    if printed[1] == "submit":
        assert printed[:3] == ["gtpo-verl", "submit", "--environment"]
        assert Path(printed[3]).samefile(ROOT / "scripts" / "environment.sh")
        return without_hardware(printed[4:])
    assert printed[:3] == ["gtpo-verl", "train", "trainer.nnodes=1"]
    return without_hardware(printed[3:])


def without_hardware(words: list[str]) -> list[str]:
    """The last word makes it a run on GPUs, also on a machine with the CPU stack."""
    assert words[-1] == "hardware=gpu"
    return words[:-1]


@pytest.mark.parametrize("size", PAIRED)
@pytest.mark.slow
def test_paired_recipes_differ_in_the_algorithm_alone(size: str, tools: Path) -> None:
    """What the three scripts of a size start is the same but for the keys that the registry lets a method change."""
    composed = {}
    for recipe in PAIRED[size]:
        config = compose_config(overrides_of(recipe, tools))
        method = algorithm_of(config)
        assert method is not None
        composed[method] = dotted(config)
    assert [method.name for method in composed] == ["dapo", "gtpo", "grpo_s"]
    (_, baseline), *others = composed.items()
    for method, settings in others:
        differing = {key for key in baseline.keys() | settings.keys() if baseline.get(key) != settings.get(key)}
        assert "algorithm.adv_estimator" in differing
        own = tuple(key for key in method.keys if key.endswith("."))
        assert [key for key in differing if key not in method.keys and not key.startswith(own)] == []


def test_the_paired_scripts_are_the_same_text_but_for_the_method() -> None:
    for recipes in PAIRED.values():
        commands = {(ROOT / "recipe" / f"{name}.sh").read_text().splitlines()[-1] for name in recipes}
        assert len({re.sub(r"algo=\w+", "", command) for command in commands}) == 1


@pytest.mark.parametrize("recipe", ["gtpo_32b", "gtpo_small", "dapo_32b_fully_async"])
def test_the_directory_works_where_it_is_copied_to_alone(recipe: str, tmp_path: Path, tools: Path) -> None:
    """As a directory of verl-recipe, without scripts/: the launchers are those of the installed package."""
    here = call(f"recipe/{recipe}.sh", "trainer.nnodes=2", tools=tools)
    copied = tmp_path / "verl-recipe" / "gtpo"
    shutil.copytree(ROOT / "recipe", copied)
    tool = tools / "gtpo-verl"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "recipes path" ] && echo {ROOT} && exit\n' + tool.read_text())
    there = call(str(copied / f"{recipe}.sh"), "trainer.nnodes=2", tools=tools)
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout.replace(f"{ROOT}/scripts", "SCRIPTS") == re.sub(r"\S*/scripts", "SCRIPTS", here.stdout)


def test_a_recipe_without_the_package_says_so() -> None:
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "recipe" / "gtpo_small.sh")],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: gtpo-verl is not on PATH")


def test_the_directory_has_the_form_of_verl_recipe() -> None:
    """Files beside README that its installer reads, and the sections that a reader looks for."""
    required = dict(
        line.split("=", 1)
        for line in (ROOT / "recipe" / "REQUIRED_VERL.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert required["MODE"] == "pinned_tag"
    assert required["TAG"] == f"v{VERL_TESTED[0]}"
    assert required["PIP_INSTALL"].endswith(f"=={VERL_TESTED[0]}")
    readme = (ROOT / "recipe" / "README.md").read_text()
    headings = re.findall(r"^## (.*)$", readme, re.MULTILINE)
    wanted = ["Required `verl` version", "When to use it", "Quick start", "Scripts", "Published results"]
    assert [heading for heading in headings if heading in wanted] == wanted
    links = re.findall(r"\]\((?!https://)([^)]*)\)", readme)
    assert "REQUIRED_VERL.txt" in links
    assert [link for link in links if not (ROOT / "recipe" / link).is_file()] == []
    assert set(re.findall(r"`(\w+_\w+)\.sh", readme)) <= set(RECIPES)
    for recipe in RECIPES:
        assert f"`{recipe}" in readme, recipe


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_a_recipe_composes_and_plans_without_an_error(recipe: str, tools: Path) -> None:
    overrides = overrides_of(recipe, tools)
    keys = [word.partition("=")[0] for word in overrides]
    assert keys[:3] == ["setting", "algo", "verifier"]
    assert len(keys) == 3 or recipe.endswith("async") or recipe == "luffy_7b"
    config = compose_config(overrides)
    prepare(config, overrides)
    plan = make_plan(config)
    assert errors_of(problems(config, plan, overrides)) == []
    size = "gpu" if recipe.startswith("smollm2") else recipe.rsplit("_", 1)[-1]
    gpus = {"small": 8, "gpu": 1}.get(size, 128 if "paper" in recipe or recipe == LADDER else 64)
    assert plan.parallel.gpus == gpus


@pytest.mark.slow
def test_the_asynchronous_recipes_make_as_many_updates_as_the_paper_with_as_long_a_warm_up(tools: Path) -> None:
    """verl counts the warm-up in steps where a step is one call of the actor, and in updates in `separate_async`."""
    found = {}
    for recipe in ("dapo_paper_32b", "dapo_32b_async", "dapo_32b_fully_async"):
        overrides = overrides_of(recipe, tools)
        config = compose_config(overrides)
        prepare(config, overrides)
        updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        asynchronous = config.trainer.v1.trainer_mode == "separate_async"
        assert not asynchronous or config.trainer.v1.separate_async.parameter_sync_step == updates
        warm_up = config.actor_rollout_ref.actor.optim.lr_warmup_steps * (1 if asynchronous else updates)
        steps = (config.trainer.total_training_steps, config.trainer.save_freq, config.trainer.test_freq)
        found[recipe] = (warm_up, *(step * updates for step in steps))
    assert set(found.values()) == {(320, 6400, 80, 80)}, found


def test_more_overrides_go_through_as_they_are(tools: Path) -> None:
    words = ["data.train_files=/a path/x.parquet", "trainer.logger=[console,wandb]"]
    for recipe in ("gtpo_32b", "gtpo_small", LADDER):
        assert overrides_of(recipe, tools, *words)[-2:] == words


@pytest.mark.parametrize("recipe", [name for name in RECIPES if re.search(r"_(7|32)b$", name)])
def test_published_figures_of_a_recipe_are_those_of_the_table(recipe: str) -> None:
    header = (ROOT / "recipe" / f"{recipe}.sh").read_text().splitlines()[1:3]
    table = (ROOT / "recipe" / "README.md").read_text()
    figures = re.findall(r"\d+\.\d+ / \d+\.\d+ / \d+\.\d+", " ".join(header))
    assert figures or recipe in (LADDER, "dapo_paper_32b", "dapo_mixed_7b", "luffy_7b")
    for figure in figures:
        assert figure in table
    assert f"`{recipe}" in table


@pytest.mark.parametrize("script", ["launch_one_node.sh", "launch_ray_cluster.sh"])
@pytest.mark.parametrize("words", [("algo=gtpo", "--check"), ("--cfg",), ("--", "algo=gtpo"), ("algo=gtpo", "--wait")])
def test_launchers_are_for_gpus_wherever_they_are_called(script: str, words: tuple[str, ...], tools: Path) -> None:
    assert call(f"scripts/{script}", *words, tools=tools).stdout.splitlines()[-1] == "hardware=gpu"
    given = call(f"scripts/{script}", "hardware=cpu", *words, tools=tools).stdout
    assert "hardware=gpu" not in given


@pytest.mark.parametrize("words", [("--list",), ("--logs", "job"), ("--logs=job",)])
def test_jobs_are_asked_for_without_overrides(words: tuple[str, ...], tools: Path) -> None:
    asked = call("scripts/launch_ray_cluster.sh", *words, tools=tools).stdout.splitlines()
    assert asked == ["gtpo-verl", "submit", *words]


def test_the_check_of_a_cluster_run_is_that_of_the_run(tools: Path) -> None:
    words = ("algo=gtpo", "trainer.run_dir=relative")
    run = call("scripts/launch_ray_cluster.sh", *words, tools=tools).stdout.splitlines()
    check = call("scripts/launch_ray_cluster.sh", *words, "--check", tools=tools).stdout.splitlines()
    assert run[:2] == ["gtpo-verl", "submit"]
    assert check == [*run[:-1], "--check", run[-1]]


@pytest.mark.slow
def test_a_one_node_recipe_prints_the_configuration_that_it_would_run() -> None:
    """With the real command behind it: `--cfg` stops before anything starts."""
    done = call("recipe/smoke_one_gpu.sh", "--cfg", tools=Path(sys.executable).parent)
    assert done.returncode == 0, done.stderr
    assert "path: Qwen/Qwen2.5-0.5B" in done.stdout
    assert "adv_estimator: gtpo" in done.stdout


@pytest.fixture
def head() -> Iterator[str]:
    """An address where something answers at Ray's port."""
    address = "127.0.0.77"
    with socket.create_server((address, 6379)):
        yield address


def test_ray_nodes(tools: Path, head: str) -> None:
    started = call("scripts/ray_node.sh", "head", tools=tools).stdout.split()
    assert started[:3] == ["ray", "start", "--head"]
    assert "--dashboard-host=127.0.0.1" in started
    opened = call("scripts/ray_node.sh", "head", tools=tools, DASHBOARD_HOST="0.0.0.0").stdout.split()
    assert "--dashboard-host=0.0.0.0" in opened
    for mode, code in (("disabled", 1), ("token", 0)):
        done = call("scripts/ray_node.sh", "head", tools=tools, DASHBOARD_HOST="0.0.0.0", RAY_AUTH_MODE=mode)
        assert (done.returncode, "set RAY_AUTH_MODE=token" in done.stderr) == (code, bool(code))
    assert call("scripts/ray_node.sh", "head", tools=tools, RAY_AUTH_MODE="disabled").returncode == 0
    worker = call("scripts/ray_node.sh", "worker", head, tools=tools).stdout.split()
    assert worker[:4] == ["ray", "start", f"--address={head}:6379", "--block"]
    lost = call("scripts/ray_node.sh", "worker", "127.0.0.78", tools=tools)
    assert (lost.returncode, lost.stdout) == (1, "")
    assert lost.stderr.startswith("error: nothing answers at 127.0.0.78:6379")
    for words in ([], ["worker"], ["head", "10.0.0.1"]):
        wrong = call("scripts/ray_node.sh", *words, tools=tools)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "usage:" in wrong.stderr


def test_a_node_without_a_token_is_told_how_to_get_one(tmp_path: Path, head: str) -> None:
    tool = tmp_path / "ray"
    tool.write_text('#!/bin/sh\n[ "$1" = start ] && echo started; [ "$*" = "get-auth-token --generate" ]\n')
    tool.chmod(0o755)
    assert call("scripts/ray_node.sh", "head", tools=tmp_path).stdout == "started\n"
    done = call("scripts/ray_node.sh", "worker", head, tools=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "copy ~/.ray/auth_token from the head" in done.stderr
    open_network = call("scripts/ray_node.sh", "worker", head, tools=tmp_path, RAY_AUTH_MODE="disabled")
    assert open_network.stdout == "started\n"


@pytest.mark.parametrize("script", ["launch_one_node.sh", "launch_ray_cluster.sh"])
def test_an_environment_that_is_not_active_is_named(script: str) -> None:
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / script), "algo=gtpo"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: gtpo-verl is not on PATH: activate its environment first.\n"


@pytest.mark.parametrize("script", ["launch_one_node.sh", "launch_ray_cluster.sh", "ray_node.sh"])
def test_an_allocator_with_which_vllm_cannot_sleep_is_refused(script: str, tools: Path) -> None:
    done = call(f"scripts/{script}", "head", tools=tools, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unset it" in done.stderr


def launch_lines() -> list[str]:
    """The complete launch lines of README.md and the documentation."""
    found = []
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line for line in lines if line.startswith("scripts/launch_") and not line.endswith("...")]
    assert len(found) >= 3
    return found


@pytest.mark.parametrize("line", launch_lines())
@pytest.mark.slow
def test_a_documented_launch_line_composes_and_plans_without_an_error(line: str) -> None:
    overrides = shlex.split(line)[1:]
    config = compose_config(overrides)
    prepare(config, overrides)
    assert errors_of(stages.problems(config)) == []
    keys = {word.partition("=")[0] for word in overrides}
    assert keys >= {"trainer.run_dir", "data.train_files", "data.val_files", "actor_rollout_ref.model.path"}


# -------------------------------------------------------------------- templates

CLUSTER_TOOL = """#!/bin/bash
case "$*" in
"list nodes"*) printf '[{"node_id": "a"}, {"node_id": "b"}]' ;;
"stop "*) echo "$@" >>"$CALLS"; touch "$CALLS.stopped"; sleep 0.5 ;;
submit*) echo "$@" >>"$CALLS"; until [ -e "$CALLS.stopped" ]; do sleep 0.05; done; exit 3 ;;
*) echo "${0##*/} $*" "$RAY_AUTH_MODE" >>"$CALLS" ;;
esac
"""


def under_slurm(directory: Path, tool: str = CLUSTER_TOOL) -> tuple[subprocess.Popen[str], Path]:
    """The script with stand-ins for `ray`, `srun` and `gtpo-verl`, and the file of their calls."""
    for name in ("ray", "srun", "gtpo-verl"):
        (directory / name).write_text(tool)
        (directory / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": str(ROOT), "JOB_NAME": "gtpo", "JOB_ID": "7", "NNODES": "2"}
    environment = {
        **os.environ,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "SLURMD_NODENAME": "n1",
        "CALLS": str(directory / "calls"),
        "PATH": f"{directory}:{os.environ['PATH']}",
    }
    command = ["bash", str(ROOT / "scripts" / "slurm.sbatch"), "algo=gtpo"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True), directory / "calls"


def wait_for(words: set[str], calls: Path) -> None:
    wait_until(lambda: words <= set((calls.read_text() if calls.exists() else "").split()))


def test_under_slurm_a_job_is_submitted_and_stopped_before_the_time_limit(tmp_path: Path) -> None:
    """The last stand-in goes on until it is asked to stop."""
    script, calls = under_slurm(tmp_path)
    wait_for({"srun", "submit"}, calls)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == 3  # the training's exit code
    lines = calls.read_text().splitlines()
    assert lines[1].startswith("ray start --head --port=6379 --dashboard-host=127.0.0.1")
    assert lines[1].endswith("token")
    assert "srun --nodes=1 --ntasks=1 --exclude=n1 scripts/ray_node.sh worker n1 token" in lines
    (submitted,) = [line for line in lines if line.startswith("submit --environment")]
    assert submitted.endswith("--id gtpo-7 trainer.nnodes=2 algo=gtpo hardware=gpu")
    assert lines[-2:] == ["stop gtpo-7 --grace 780", "ray stop token"]


def test_under_slurm_a_request_to_stop_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    script, calls = under_slurm(tmp_path, CLUSTER_TOOL.replace('touch "$CALLS.stopped"', "exit 2"))
    wait_for({"srun", "submit"}, calls)
    script.send_signal(signal.SIGUSR1)
    wait_for({"stop"}, calls)
    (tmp_path / "calls.stopped").touch()  # the training goes on, to its end
    assert script.wait(timeout=60) == 3
    assert "warning: the job was not stopped" in script.communicate()[1]


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ('case "$0 $*" in *srun*) exit 1 ;; *"list nodes"*) printf \'{"node_id": "a"}\' ;; esac\n', 1),
        (CLUSTER_TOOL.replace("exit 3", "kill -KILL $$").replace('[ -e "$CALLS.stopped" ]', "true"), 137),
    ],
    ids=["a node does not join", "the launcher is killed"],
)
def test_under_slurm_what_fails_ends_the_script(tmp_path: Path, tool: str, code: int) -> None:
    script, _ = under_slurm(tmp_path, tool if tool.startswith("#!") else f"#!/bin/bash\n{tool}")
    _, said = script.communicate(timeout=60)
    assert script.returncode == code
    assert ("error: not all of the 2 nodes have joined" in said) == (code == 1)


def test_the_options_of_the_slurm_script_stand_before_its_first_command() -> None:
    """sbatch reads no option behind a command."""
    lines = (ROOT / "scripts" / "slurm.sbatch").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(options) > 5
    assert max(options) < first


def test_the_run_of_the_kuberay_template_composes_and_gets_the_nodes_that_it_wants() -> None:
    spec = yaml.safe_load((ROOT / "scripts" / "kuberay_rayjob.yaml").read_text())["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["python", "-m", "gtpo_verl.train"]
    config = compose_config(words[3:])
    cluster = spec["rayClusterSpec"]
    pins = (ROOT / "gtpo_verl" / "gpu_constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    (group,) = cluster["workerGroupSpecs"]
    assert 1 + group["replicas"] == config.trainer.nnodes
    for node in (cluster["headGroupSpec"], group):
        (container,) = node["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.trainer.n_gpus_per_node
        volumes = {volume["name"] for volume in node["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
