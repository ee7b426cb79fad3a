"""The prepared task on disk: verl's schema, a model that fits its tokenizer, written atomically."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.config import choices, compose_config, option_keys
from gtpo_verl.errors import UserError
from gtpo_verl.tasks import Task, WarmStart, prepare
from gtpo_verl.tasks import model as tiny
from gtpo_verl.tasks import task as embedded_task
from gtpo_verl.tasks.prepare import measure_accuracy, partition
from gtpo_verl.tasks.sums.task import MAX_PROMPT_LENGTH, TASK

QUICK = {"train_prompts": 200, "val_prompts": 10, "warm_start": WarmStart(steps=2, batch_size=4)}


def prepare_task(directory: Path, seed: int = 0, **changes) -> Task:
    return prepare.prepare_task(replace(TASK, **changes), directory, seed=seed)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Work this small gains nothing from a second thread, and waits for it long where the cores are busy."""
    before = torch.get_num_threads(), prepare.WARM_START_THREADS
    torch.set_num_threads(1)
    prepare.WARM_START_THREADS = 1
    yield
    torch.set_num_threads(before[0])
    prepare.WARM_START_THREADS = before[1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A task that is real but for its warm start of two steps."""
    return prepare_task(tmp_path_factory.mktemp("prepared") / "task", **QUICK)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.build_tokenizer()


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file.relative_to(directory)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in directory.rglob("*")
        if file.is_file()
    }


def prompts_of(file: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in pq.read_table(file).to_pylist()]


# What is in the files


def test_rows_are_in_verls_schema(prepared: Task):
    for file, split, count in ((prepared.train_file, "train", 200), (prepared.val_file, "val", 10)):
        rows = pq.read_table(file).to_pylist()
        assert len(rows) == count
        for index, row in enumerate(rows):
            (message,) = row["prompt"]
            assert message["role"] == "user"
            question = message["content"]
            assert row == {
                "data_source": "gtpo_verl/sums",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(sum(map(int, question.split("+"))))},
                "extra_info": {
                    "index": index,
                    "split": split,
                    "question": question,
                    "cluster": "+".join(sorted(question.strip().split("+"))),
                },
            }


def test_no_multiset_of_operands_is_in_two_of_training_validation_and_warm_start(
    prepared: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen: set[str] = set()

    def record(model, tokenizer, pairs, recipe, on_step):
        seen.update(prompt for prompt, _ in islice(pairs, 50_000))

    def multisets(prompts: Iterable[str]) -> set[str]:
        return {"".join(sorted(prompt)) for prompt in prompts}

    monkeypatch.setattr(tiny, "warm_start", record)
    again = prepare_task(tmp_path / "task", **QUICK)
    train, val = prompts_of(again.train_file), prompts_of(again.val_file)
    assert (train, val) == (prompts_of(prepared.train_file), prompts_of(prepared.val_file))
    assert len({*train, *val}) == 210
    assert len(seen) > 6_900  # nearly all of the 7,080 that are left
    assert multisets(seen).isdisjoint(multisets(train))
    assert multisets(seen).isdisjoint(multisets(val))
    assert multisets(train).isdisjoint(multisets(val))


def test_the_manifest_tells_what_was_made(prepared: Task):
    manifest = json.loads((prepared.model_path.parent / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert manifest["sizes"] == {"validation": 10, "train": 200, "warm_start": 7080}
    assert sum(manifest["clusters"].values()) == 660
    assert manifest["recipe"]["steps"] == 2
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["baseline"]["samples"] == 40
    assert prepared.baseline == manifest["baseline"]["accuracy"]


# The tokenizer and the model


@pytest.fixture(scope="module")
def loaded(prepared: Task):
    """The tokenizer as verl and vLLM get it."""
    return AutoTokenizer.from_pretrained(prepared.model_path)


SPECIAL = ("<eos>", "<pad>")  # each is one token, wherever it is in the text


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: not any(map(text.__contains__, SPECIAL)))
)
def test_any_text_survives_the_tokenizer(tokenizer, loaded, text: str):
    ids = tokenizer(text).input_ids
    composed = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(ids) == composed
    assert len(ids) == len(composed.encode())
    assert loaded(text).input_ids == ids
    assert loaded.decode(ids) == composed


def test_a_newline_is_one_token(loaded):
    assert len(loaded("\n").input_ids) == 1


def test_the_chat_template_only_joins(loaded):
    messages = [{"role": "user", "content": "3+9+2+7\n"}, {"role": "assistant", "content": "3+9=12;"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "3+9+2+7\n3+9=12;"
    assert loaded.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == "3+9+2+7\n"


def test_model_and_tokenizer_agree(prepared: Task, loaded):
    model = AutoModelForCausalLM.from_pretrained(prepared.model_path)
    assert model.config.vocab_size == model.lm_head.out_features == len(loaded) == len(tiny.build_tokenizer()) == 258
    assert (model.config.eos_token_id, model.config.pad_token_id) == (loaded.eos_token_id, loaded.pad_token_id)
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert 650_000 < model.num_parameters() < 670_000


def test_building_a_model_leaves_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = (tiny.build_model(258, seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_the_warm_start_scores_the_demonstration_and_its_end_alone(tokenizer):
    input_ids, labels = tiny._collate(tokenizer, [("1+2\n", "#3"), ("1+2+3\n", "1+2=3;#6")])
    eos = tokenizer.eos_token_id
    assert input_ids[0].tolist() == [*tokenizer("1+2\n#3").input_ids, eos, *[tokenizer.pad_token_id] * 8]
    assert labels[0].tolist() == [-100] * 4 + [*tokenizer("#3").input_ids, eos] + [-100] * 8
    assert labels[1].tolist() == [-100] * 6 + [*tokenizer("1+2=3;#6").input_ids, eos]


def sampled(model, tokenizer, prompts: list[str], limit: int) -> list[str]:
    return tokenizer.batch_decode(tiny.sample(model, tokenizer, prompts, limit, seed=0), skip_special_tokens=True)


def test_the_warm_start_learns_what_it_is_shown(tokenizer):
    model = tiny.build_model(len(tokenizer), seed=0)
    losses: list[float] = []
    pair = ("1+2\n", "1+2=3;#3")
    tiny.warm_start(model, tokenizer, iter([pair] * 80), WarmStart(steps=80, batch_size=1), losses.append)
    assert len(losses) == 80
    assert losses[0] > 5.0  # near log 258, ignorance
    assert losses[-1] < 0.1
    assert sampled(model, tokenizer, [pair[0]], 32) == [pair[1]]


def test_sampling_answers_each_prompt_in_its_place(tokenizer):
    """Prompts of several lengths, mixed: the cached, grouped sampler must find the likeliest tokens that HF's finds."""
    model = tiny.build_model(len(tokenizer), seed=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)  # so sharp a distribution that sampling is certain
    prompts = ["1+2+3\n", "9+9+9+9\n", "4+5+6\n", "2+2+2+2\n", "7\n"]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        expected.append(tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True))
    assert len(set(expected)) > 1
    assert sampled(model, tokenizer, prompts, 6) == expected


def test_sampling_is_at_temperature_one(tokenizer):
    """First tokens of many samples must follow the model's own distribution, pinned here to 0.2, 0.3 and 0.5."""
    model = tiny.build_model(len(tokenizer), seed=0).eval()
    probabilities = dict(zip(tokenizer("abc").input_ids, (0.2, 0.3, 0.5), strict=True))
    bias = torch.full((258,), -100.0)
    for token, probability in probabilities.items():
        bias[token] = torch.tensor(probability).log()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.bias = torch.nn.Parameter(bias)
    drawn = "".join(sampled(model, tokenizer, ["1+2\n"] * 5_000, 1))
    for letter, probability in zip("abc", (0.2, 0.3, 0.5), strict=True):
        assert drawn.count(letter) / 5_000 == pytest.approx(probability, abs=0.03)


# Cache and atomicity


def test_a_second_call_changes_nothing(prepared: Task):
    directory = prepared.model_path.parent
    before = contents(directory)
    assert prepare_task(directory, **QUICK) == prepared
    assert contents(directory) == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"val_prompts": 11}, {"warm_start": WarmStart(steps=1, batch_size=4)}])
def test_other_parameters_replace_the_task(change: dict, tmp_path: Path):
    first = prepare_task(tmp_path / "task", **QUICK)
    validated = prompts_of(first.val_file)
    second = prepare_task(tmp_path / "task", **QUICK | change)
    assert second.manifest["key"] != first.manifest["key"]
    assert (prompts_of(second.val_file) == validated) == ("warm_start" in change)
    assert left_in(tmp_path) == ["task"]


def test_another_version_of_the_code_replaces_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare_task(tmp_path / "task", **QUICK)
    monkeypatch.setattr(prepare, "__version__", "0.0.0")
    assert prepare_task(tmp_path / "task", **QUICK).manifest["key"] != first.manifest["key"]


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith((".lock", ".lock.json")))


@pytest.mark.parametrize("stage", ["warm_start", "sample", "save"])
def test_an_interrupted_preparation_leaves_nothing(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_task(tmp_path / "task", **QUICK)
    assert left_in(tmp_path) == []


def test_an_interrupted_replacement_leaves_the_former_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    former = prepare_task(tmp_path / "task", **QUICK)
    before = contents(tmp_path / "task")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "warm_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_task(tmp_path / "task", **QUICK | {"seed": 1})
    assert left_in(tmp_path) == ["task"]
    assert contents(tmp_path / "task") == before
    assert prepare_task(tmp_path / "task", **QUICK) == former


def in_a_process(directory: Path) -> subprocess.Popen[str]:
    code = (
        "import json, sys; from pathlib import Path; from gtpo_verl.tasks import task; "
        "from gtpo_verl.tasks.prepare import prepare_task; "
        "print(json.dumps(prepare_task(task('sums'), Path(sys.argv[1])).manifest))"
    )
    return subprocess.Popen([sys.executable, "-c", code, directory], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_preparation_is_cleared_away_by_the_next(tmp_path: Path):
    with in_a_process(tmp_path / "task") as process:
        while not list(tmp_path.glob(".task.unfinished-*/*/val.parquet")):
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    assert [name.split("-")[0] for name in left_in(tmp_path)] == [".task.unfinished"]
    prepare_task(tmp_path / "task", **QUICK)
    assert left_in(tmp_path) == ["task"]


@pytest.mark.parametrize("name", ["notes.txt", "model"])
def test_a_directory_with_something_else_is_refused_and_kept(name: str, tmp_path: Path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / name).write_text("mine")
    with pytest.raises(UserError, match="not a prepared task"):
        prepare_task(tmp_path / "task", **QUICK)
    assert (tmp_path / "task" / name).read_text() == "mine"


def test_what_is_not_the_tasks_own_is_never_replaced(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "my data"}')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text('{"key": "another", "parameters": {}}')
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name in ("other", "mine"):
        with pytest.raises(UserError, match="not a prepared task, or holds other files too"):
            prepare_task(tmp_path / name, **QUICK)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    for text in ("{", "[1]"):
        (tmp_path / "other" / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            prepare_task(tmp_path / "other", **QUICK)


def test_an_empty_directory_is_taken(tmp_path: Path):
    (tmp_path / "task").mkdir()
    assert prepare_task(tmp_path / "task", **QUICK).model_path.is_dir()


def test_sizes_that_do_not_fit_are_the_users_to_change(tmp_path: Path):
    with pytest.raises(UserError, match="choose other sizes"):
        prepare_task(tmp_path / "task", train_prompts=7000, val_prompts=512)
    assert left_in(tmp_path) == []


def test_a_baseline_out_of_range_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prepare_task(tmp_path / "task", **QUICK)
    assert "a baseline outside 0.3 to 0.6 leaves little to learn from" in capsys.readouterr().out


# The task that the quickstart trains on


@pytest.mark.slow
def test_the_default_task_starts_between_forty_and_fifty_five_percent(default_task_dir: Path):
    """Two processes ask for it at once: one makes it, the other waits for it, and both get the same.

    After the end-to-end tests it is there already, and neither makes it.
    """
    directory = default_task_dir
    to_be_made = 0 if directory.exists() else 1
    with in_a_process(directory) as first, in_a_process(directory) as second:
        outputs = [process.communicate()[0].splitlines() for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert sum("warm start of a Qwen2" in line for lines in outputs for line in lines) == to_be_made
    manifests = [json.loads(lines[-1]) for lines in outputs]
    assert manifests[0] == manifests[1]
    baseline = manifests[0]["baseline"]
    assert baseline["samples"] == 4096
    assert 0.40 <= baseline["accuracy"] <= 0.55
    assert 0.004 < baseline["standard_error"] < 0.015

    # The model on disk, sampled anew with another seed, is the one that was measured.
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model").eval()
    validation = partition(TASK, 0).validation
    again = measure_accuracy(TASK, model, tokenizer, validation, seed=1)
    spread = (again["standard_error"] ** 2 + baseline["standard_error"] ** 2) ** 0.5
    assert abs(again["accuracy"] - baseline["accuracy"]) < 4 * spread

    code = (
        "import sys; from pathlib import Path; from gtpo_verl.tasks.sums.task import TASK; "
        "from gtpo_verl.tasks.prepare import prepare_task; "
        "prepare_task(TASK, Path(sys.argv[1])); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    reused = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True)
    assert reused.returncode == 0, reused.stderr
    assert "reusing" in reused.stdout


@pytest.mark.slow
def test_verl_reads_the_files_and_drops_no_prompt(prepared: Task):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"max_prompt_length": MAX_PROMPT_LENGTH, "filter_overlong_prompts": True})
    tokenizer = AutoTokenizer.from_pretrained(prepared.model_path)
    dataset = RLHFDataset(str(prepared.val_file), tokenizer, config)
    assert len(dataset) == 10
    assert dataset[0]["raw_prompt"][0]["content"] == prompts_of(prepared.val_file)[0]
    assert dataset[0]["extra_info"]["split"] == "val"


# The interface of embedded tasks


def test_a_task_is_known_by_its_name():
    sums = embedded_task("sums")
    assert (sums.name, sums.data_source) == ("sums", "gtpo_verl/sums")
    with pytest.raises(UserError, match="no embedded task 'sum'; did you mean sums"):
        embedded_task("sum")


def test_the_quickstarts_setting_scores_with_the_tasks_verifier():
    config = compose_config(["algo=dapo", "setting=quickstart", "hardware=cpu"])
    assert config.reward.custom_reward_function.path == embedded_task("sums").reward


@pytest.mark.parametrize("name", choices("task"))
def test_a_tasks_setting_is_that_of_its_package(name: str):
    """Verifier and limit of a run are the task's, and its longest prompt fits."""
    config = compose_config(["algo=dapo", "setting=quickstart", "hardware=cpu", f"task={name}"])
    found = embedded_task(name)
    assert config.reward.custom_reward_function.path == found.reward
    assert config.data.max_response_length == found.max_response_length
    assert config.data.max_prompt_length == max(len(found.prompt(problem)) for problem in found.problems)
    assert {"compute_score", "random_verdict"} <= vars(
        importlib.import_module(found.reward.removeprefix("pkg://"))
    ).keys()


def test_a_setting_sets_what_its_task_sets():
    own, of_task = option_keys("setting", "quickstart"), option_keys("task", "sums")
    assert "reward.custom_reward_function.path" in of_task < own


def test_a_setting_without_a_task_has_none_to_choose():
    with pytest.raises(UserError, match="task=: this setting has no embedded task"):
        compose_config(["algo=dapo", "setting=small_gpu", "task=countdown"])
