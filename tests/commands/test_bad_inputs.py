"""Bad input to every command: one line that names the place and the remedy, and an exit code that is not 0.

Nothing here starts Ray: what is wrong is found before.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from gtpo_verl.cli import main
from gtpo_verl.errors import main_guard
from gtpo_verl.tasks import task as embedded_task
from gtpo_verl.tasks.prepare import prepare_task

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # each rule has a test of its own beside it

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

# Overrides of a sound training, and what its one line has to say.
SETTINGS: dict[str, tuple[str, ...]] = {
    "algo=gtop": ("gtop", "gtpo"),
    "setting=quickstrt": ("quickstrt", "quickstart"),
    "backend=deepspeed": ("deepspeed", "fsdp"),
    "verifier=antwort": ("antwort", "answer"),
    "task=sum": ("sum", "sums"),
    "data.train_batch_size=0": ("data.train_batch_size=0", "from 1"),
    "data.train_batch_size=24.5": ("data.train_batch_size=24.5", "from 1"),
    "data.train_batch_sise=24": ("data.train_batch_sise", "data.train_batch_size"),
    "data.max_prompt_length=4": ("data.max_prompt_length", "raise that"),
    "data.max_response_length=100000": ("max_model_len", "100008"),
    f"{ROLLOUT}.n=1": (f"{ROLLOUT}.n=1", "two"),
    f"{ROLLOUT}.n=many": (f"{ROLLOUT}.n=many", "number"),
    f"{ROLLOUT}.temperature=0": (f"{ROLLOUT}.temperature=0", "above 0"),
    f"{ROLLOUT}.temperature=nan": (f"{ROLLOUT}.temperature", "above 0"),
    f"{ROLLOUT}.top_p=1.5": (f"{ROLLOUT}.top_p=1.5", "at most 1"),
    f"{ROLLOUT}.dtype=float9": (f"{ROLLOUT}.dtype=float9", "choose"),
    f"{ROLLOUT}.val_kwargs.n=0": (f"{ROLLOUT}.val_kwargs.n=0", "from 1"),
    f"{ACTOR}.ppo_mini_batch_size=1000": (f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
    f"{ACTOR}.optim.lr=fast": (f"{ACTOR}.optim.lr=fast", "number"),
    f"{ACTOR}.policy_loss.loss_mode=nonsense": ("loss_mode", "nonsense"),
    f"{ACTOR}.clip_ratio_high=-1": ("clip_ratio_high", "-1"),
    "trainer.n_gpus_per_node=7": ("7 data-parallel ranks", "ppo_mini_batch_size"),
    "trainer.nnodes=0": ("trainer.nnodes=0", "from 1"),
    "trainer.logger=[bogus]": ("trainer.logger", "bogus"),
    "trainer.run_dir=/proc/1/x": ("/proc/1/x",),
    "trainer.save_freq=1.5": ("trainer.save_freq=1.5", "number of steps"),
    "trainer.total_training_steps=0": ("trainer.total_training_steps=0", "from 1"),
    "trainer.resume_mode=never": ("trainer.resume_mode=never", "auto"),
    "trainer.resume_mode=resume_path": ("trainer.resume_from_path",),
    "algorithm.adv_estimator=gtpoo": ("gtpoo", "gtpo"),
    "algorithm.gtpo.alpha1=-1": ("algorithm.gtpo", "alpha1", "-1"),
    "algorithm.gtpo.entropy_floor=0": ("algorithm.gtpo", "entropy_floor", "above 0"),
    "algorithm.gtpo.alpah1=1": ("alpah1", "alpha1"),
    "algorithm.entropy.source=oracle": ("algorithm.entropy.source", "oracle"),
    "algorithm.filter_groups.on_budget=explode": ("on_budget=explode", "train_smaller"),
    "algorithm.filter_groups.max_num_gen_batches=-1": ("max_num_gen_batches=-1",),
    "guards.not_finite=continue": ("guards.not_finite=continue", "skip"),
    "guards.max_failed_share=0": ("guards.max_failed_share=0", "above 0"),
    "guards.stall_timeout=soon": ("guards.stall_timeout=soon",),
    "reward.reward_kwargs.overlong_buffer_cfg.len=1000": ("overlong_buffer_cfg.len", "max_response_length"),
    "seed=-1": ("seed=-1", "from 0"),
    "seed=abc": ("seed=abc", "number"),
    "a=b=c": ("a=b=c", "KEY=VALUE"),
    "=3": ("no such key",),
    "nonsense": ("nonsense", "KEY=VALUE"),
    "trainer": ("trainer", "KEY=VALUE"),
}


def rows(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path, Path], Path]:
    """A file whose rows are those of the task, changed."""

    def write(task: Path, place: Path) -> Path:
        table = parquet.read_table(task / "train.parquet").slice(0, 64).to_pylist()
        change(table)
        parquet.write_table(pa.Table.from_pylist(table), place / "rows.parquet")
        return place / "rows.parquet"

    return write


def text(name: str, content: bytes) -> Callable[[Path, Path], Path]:
    def write(task: Path, place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return write


def without(column: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(table: list[dict[str, Any]]) -> None:
        for row in table:
            del row[column]

    return change


def in_row_8(column: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(table: list[dict[str, Any]]) -> None:
        table[8][column] = value

    return change


def cut(task: Path, place: Path) -> Path:
    whole = (task / "train.parquet").read_bytes()
    (place / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    return place / "cut.parquet"


# Training files, and what the line says beside their name.
DATA: dict[str, tuple[Callable[[Path, Path], Path], tuple[str, ...]]] = {
    "no file": (lambda task, place: place / "nothing.parquet", ()),
    "a directory": (lambda task, place: place, ()),
    "cut off": (cut, ()),
    "a text": (text("text.parquet", b"no parquet"), ()),
    "empty": (text("empty.parquet", b""), ()),
    "csv": (text("rows.csv", b"prompt,answer\n1,2\n"), ()),
    "torn json": (text("rows.jsonl", b'{"prompt": [\n'), ()),
    "no rows": (rows(lambda table: table.clear()), ()),
    "no prompts": (rows(without("prompt")), ("prompt",)),
    "no truths": (rows(without("reward_model")), ("reward_model",)),
    "no source": (rows(without("data_source")), ("data_source",)),
    "a null prompt": (rows(in_row_8("prompt", None)), ("row 8", "prompt")),
    "an empty prompt": (rows(in_row_8("prompt", [])), ("row 8", "prompt")),
    "a long prompt": (rows(in_row_8("prompt", [{"role": "user", "content": "7" * 500}])), ("max_prompt_length",)),
}
ANSWER = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    "
# Reward files, and what the line says beside their name.
REWARDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a syntax error": ("def compute_score(:\n", ("SyntaxError", ":1")),
    "an import error": ("import does_not_exist\n", ("does_not_exist", ":1")),
    "an error at import": ("x = 1\ny = 1 / 0\n", ("ZeroDivisionError", ":2")),
    "an exit at import": ("import sys\nsys.exit(5)\n", ("SystemExit", ":2")),
    "another name": ("def score(*args, **kwargs):\n    return 1.0\n", ("compute_score",)),
    "no function": ("compute_score = 3\n", ("not callable",)),
    "other parameters": ("def compute_score(answer):\n    return 1.0\n", ("compute_score",)),
    "a string": (ANSWER + "return 'good'\n", ("good", "number")),
    "nothing": (ANSWER + "return None\n", ("None", "number")),
    "a dict without a score": (ANSWER + "return {'acc': 1.0}\n", ("score",)),
    "a score that is a text": (ANSWER + "return {'score': 'x', 'acc': 1.0}\n", ("number",)),
    "nan": (ANSWER + "return {'score': float('nan'), 'acc': 1.0}\n", ("nan",)),
    "a verdict that is a text": (ANSWER + "return {'score': 1.0, 'acc': 'yes'}\n", ("acc",)),
    "an error": (ANSWER + "raise KeyError('answer')\n", ("KeyError", ":2")),
    "an exit": (ANSWER + "raise SystemExit(3)\n", ("SystemExit", ":2")),
}
# Models, as what is done to a copy of a sound one, and what the line says.
MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "nothing": (shutil.rmtree, ()),
    "an empty directory": (lambda model: [file.unlink() for file in model.iterdir()], ("config.json",)),
    "no json": (lambda model: (model / "config.json").write_text("{"), ("config.json",)),
    "no tokenizer": (lambda model: [file.unlink() for file in model.glob("*token*")], ("tokenizer",)),
    "a broken template": (lambda model: (model / "chat_template.jinja").write_text("{% for %}"), ("template",)),
    "cut off weights": (lambda model: os.truncate(model / "model.safetensors", 1000), ("model.safetensors",)),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), ("weights",)),
    "another vocabulary": (
        lambda model: (model / "config.json").write_text(
            json.dumps(json.loads((model / "config.json").read_text()) | {"vocab_size": 999})
        ),
        ("999",),
    ),
}
# Other commands, in a directory with an empty folder `empty`, a text `file` and a sound task `task`; `...` is nothing.
COMMANDS: dict[str, tuple[str, ...]] = {
    "eval ...": ("...",),
    "eval empty": ("empty",),
    "eval task/model setting=quickstart hardware=cpu data.val_files=...": ("...",),
    "report ...": ("...",),
    "report empty": ("empty",),
    "report file": ("file",),
    "status ...": ("...",),
    "status file": ("file",),
    "stop ...": ("...",),
    "export ...": ("...",),
    "export empty": ("empty",),
    "sweep --check algo=dapo,gtop setting=quickstart hardware=cpu": ("gtop",),
    "sweep --check seed=range(1000000000) algo=dapo": ("1000000000", "sweep.max_runs"),
    "sweep --check setting=quickstart hardware=cpu algo=dapo": ("a sweep needs an axis",),
    "plan setting=paper_gtpo_32b --assume nonsense=1": ("nonsense",),
    "plan setting=paper_gtpo_32b --gpu-memory -1": ("gpu_memory=-1",),
    "plan setting=paper_gtpo_32b --yield 0": ("sampling_yield=0",),
    "plan setting=paper_gtpo_32b --measured empty": ("empty",),
    "prepare-data nonsense": ("nonsense",),
    "prepare-data parquet ... --output x": ("...",),
    "prepare-data parquet file --output x": ("file",),
    "prepare-data reasoning-gym:nonsense --output x": ("nonsense",),
    "prepare-data reasoning-gym:chain_sum,nonsense=1 --output x": ("nonsense",),
    "prepare-data gguf:... --output x": ("...",),
    "prepare-data gguf:file --output x": ("file", "GGUF"),
    "prepare-data sums --output /proc/x": ("/proc/x",),
    "verify ...": ("...",),
    "verify file": ("file",),
    "traces ... task/train.parquet setting=quickstart hardware=cpu": ("...",),
    "audit ...": ("...",),
    "audit --reanalyse empty": ("empty",),
    "audit task/model setting=quickstart hardware=cpu --methods nonsense": ("nonsense",),
    "audit task/model setting=quickstart hardware=cpu data.val_files=task/val.parquet --check "
    "actor_rollout_ref.rollout.top_p=0.9": ("top_p=0.9", "an audit needs the entropy"),
    "submit --list --address http://127.0.0.1:9": ("http://127.0.0.1:9", "--address"),
    "submit --list --address nowhere": ("nowhere", "--address"),
    "submit --address http://127.0.0.1:9 -- setting=quickstart hardware=cpu": ("trainer.run_dir",),
    "quickstart --arms dapo,nonsense": ("nonsense",),
    "quickstart --steps 0": ("--steps 0",),
    "recipes nonsense": ("nonsense",),
    "nonsense": ("nonsense",),
}


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    here = psutil.Process()
    before = here.children(recursive=True)
    yield
    started = [process for process in here.children(recursive=True) if process not in before]
    _, left = psutil.wait_procs(started, timeout=5)
    assert [" ".join(process.cmdline()) for process in left] == []


@pytest.fixture(scope="session")
def task(default_task_dir: Path) -> Path:
    return prepare_task(embedded_task("sums"), default_task_dir).model_path.parent


def one_line(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says, a line for each problem; one cause may be several, as for both files of data."""
    capfd.readouterr()
    try:
        code = main_guard(lambda: main(list(arguments)))
    except SystemExit as ended:  # argparse
        code = ended.code
    printed = capfd.readouterr()
    assert code == 2, printed
    assert "Traceback" not in printed.out + printed.err
    lines = [line for line in printed.err.splitlines() if line.strip()]
    if not lines[0].startswith("usage:"):
        assert 1 <= sum(line.startswith("error: ") for line in lines) <= 3, printed.err
    assert "error: " in lines[-1], printed.err
    return "\n".join(line for line in lines if "error: " in line)


def check(capfd: pytest.CaptureFixture[str], task: Path, place: Path, *overrides: str) -> str:
    """What `train --check` says of a sound training with these overrides."""
    files = (f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}")
    sound = (
        "setting=quickstart",
        "hardware=cpu",
        "algo=gtpo",
        *files,
        f"actor_rollout_ref.model.path={task / 'model'}",
    )
    return one_line(capfd, "train", "--check", *sound, f"trainer.run_dir={place / 'run'}", *overrides)


def names(line: str, *words: str) -> None:
    missing = [word for word in words if word not in line]
    assert not missing, line
    said = line.partition(" It has: ")[0]  # and whatever there is to choose from
    assert max(map(len, said.splitlines())) < 700, line


@pytest.mark.parametrize("override", SETTINGS)
def test_a_setting(override: str, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names(check(capfd, task, tmp_path, override), *SETTINGS[override])


@pytest.mark.parametrize("name", DATA)
def test_data(name: str, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write, words = DATA[name]
    file = write(task, tmp_path)
    names(check(capfd, task, tmp_path, f"data.train_files={file}"), str(file), *words)


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_file(name: str, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, words = REWARDS[name]
    file = tmp_path / "reward.py"
    file.write_text(content)
    override = f"reward.custom_reward_function.path={file}"
    names(check(capfd, task, tmp_path, override, "reward.custom_reward_function.name=compute_score"), str(file), *words)


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, words = MODELS[name]
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    spoil(model)
    names(check(capfd, task, tmp_path, f"actor_rollout_ref.model.path={model}"), str(model), *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(
    command: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "task").symlink_to(task)
    nothing = str(tmp_path / "nothing")
    arguments = [word.replace("...", nothing) for word in command.split()]
    names(one_line(capfd, *arguments), *(word.replace("...", nothing) for word in COMMANDS[command]))
