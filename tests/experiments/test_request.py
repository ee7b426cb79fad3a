"""What is said of a run where it is submitted."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gtpo_verl.config import parse_overrides, with_config_dir
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import request
from gtpo_verl.experiments.request import check_request, in_job, run_dir_of

RUN = "trainer.run_dir=/shared/run"
DATA = ("data.train_files=/only/there.parquet", "data.val_files=s3://bucket/val.parquet")


@pytest.fixture(autouse=True)
def thin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without verl, and an empty current directory."""
    monkeypatch.setattr(request, "_can_compose", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(thin: Path) -> Path:
    file = thin / "it's a file.parquet"
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "data_source": "s", "reward_model": {"ground_truth": "2"}}]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def check(*overrides: str, carried: tuple[str, ...] = ()) -> list[str]:
    given = [RUN, *DATA, *overrides]
    result = check_request(given, working_dir=Path.cwd(), carried=[Path(name) for name in carried])
    return result[3:]


def test_what_only_the_cluster_knows_passes_unchanged() -> None:
    words = ["algo=gtpo", "algorithm.gtpo.alpha2=0.2", "+no.such.key=1", "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"]
    assert check(*words) == words


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo=gtpx", r"algo=gtpx: no such algo; did you mean gtpo\? Choose one of"),
        ("a=b=c", "'a=b=c' does not parse as KEY=VALUE"),
        ("a b", "'a b' does not parse as KEY=VALUE"),
        (
            "trainer.run_dir=~/run",
            r"does not parse as KEY=VALUE \(a value with ~, = or é in it needs quotes: 'KEY=\"VALUE\"'\)",
        ),
        ("seed=1,2", "seed=1,2: a run has one value of each key"),
        ("data.train_files=missing.parquet", "data.train_files=missing.parquet: no such file here"),
        ("data.val_files=null", "no data: set data.val_files"),
        ("data.val_files=", "no data: set data.val_files"),
        ("data.val_files=[]", "no data: set data.val_files"),
        ("actor_rollout_ref.model.path=./model", "actor_rollout_ref.model.path=./model: no such file here"),
        ("reward.custom_reward_function.path=mine.py", "the job would not carry this file, not in"),
    ],
)
def test_a_mistake_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check(override)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["", "trainer.run_dir=runs/a", "trainer.run_dir=null", "trainer.run_dir=/a-${seed}"])
def test_a_run_directory_must_be_absolute(word: str) -> None:
    with pytest.raises(UserError, match=r"add trainer\.run_dir=/DIRECTORY, an absolute path"):
        run_dir_of([word] if word else [])


def test_relative_data_become_the_same_file_for_hydra(data: Path, thin: Path) -> None:
    (thin / "model").mkdir()
    keys = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "algorithm.guide.model")
    (word, *models) = check(f'data.train_files="{data.name}"', *(f"{key}=model" for key in keys))
    assert parse_overrides([word])[0].value() == str(data)
    assert models == [f'{key}="{thin}/model"' for key in keys]
    (word,) = check(f'data.val_files=["{data.name}",/there.parquet]')
    assert parse_overrides([word])[0].value() == [str(data), "/there.parquet"]


def test_a_link_to_data_keeps_its_name(data: Path, thin: Path) -> None:
    (thin / "link.parquet").symlink_to(data.rename(thin / "blob"))
    assert check("data.train_files=link.parquet") == [f'data.train_files="{thin}/link.parquet"']


def test_data_that_lie_here_are_checked(thin: Path) -> None:
    pq.write_table(pa.table({"prompt": ["1+1"]}), thin / "bad.parquet")
    with pytest.raises(UserError, match="lacks the columns data_source, reward_model"):
        check("data.train_files=bad.parquet")


def test_settings_of_data_are_used_where_they_have_verls_type(data: Path) -> None:
    """Another type is for the rules of ranges, which calculate with nothing."""
    file = f'data.train_files="{data.name}"'
    with pytest.raises(UserError, match=r"has 1 prompts, fewer than data\.train_batch_size=64"):
        check(file, "data.train_batch_size=64")
    with pytest.raises(UserError, match="lacks the column question"):
        check(file, "data.prompt_key=question")
    wrong = ["data.train_batch_size=null", "data.train_max_samples=many", "data.prompt_key=3"]
    assert check(file, *wrong)[1:] == wrong


def test_code_must_be_among_the_carried_files(thin: Path) -> None:
    (thin / "rewards").mkdir()
    (thin / "rewards" / "mine.py").write_text("")
    word = "reward.custom_reward_function.path=./rewards/mine.py"
    assert check(word, carried=("rewards/mine.py",)) == [word]
    with pytest.raises(UserError, match="which an exclude pattern leaves out"):
        check(word)
    for elsewhere in ("pkg://my_package.reward", "/opt/mine.py"):
        assert check(f"reward.custom_reward_function.path={elsewhere}")


def test_where_verl_is_installed_every_key_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"algorithm.gtpo.alpha9: no such key; did you mean"):
        check("algorithm.gtpo.alpha9=1")


def test_a_directory_of_configuration_is_found_in_the_copy_of_the_job(thin: Path) -> None:
    (thin / "job" / "conf" / "algo").mkdir(parents=True)
    (thin / "job" / "conf" / "algo" / "mine.yaml").touch()
    given = with_config_dir([RUN, "algo=mine", *DATA], thin / "job" / "conf")
    carried = [Path("conf/algo/mine.yaml")]
    searched, *rest = check_request(given, working_dir=thin / "job", carried=carried)
    assert searched == 'hydra.searchpath=["file://conf"]'
    assert "algo=mine" in rest
    relative = [RUN, *DATA, "hydra.searchpath=[file://job/conf, pkg://mine]"]  # of the directory of the command
    searched = check_request(relative, working_dir=thin / "job", carried=carried)[-1]
    assert searched == 'hydra.searchpath=["file://conf","pkg://mine"]'
    shared = 'hydra.searchpath=["file:///shared/conf"]'
    assert in_job([shared], thin / "job") == [shared]
    own = with_config_dir([RUN, "setting=mine"], thin / "job" / "conf")  # a file of theirs may name the data
    assert check_request(own, working_dir=thin / "job", carried=carried)[1:] == own[1:]
    for files, place in (([], "conf"), (carried, "elsewhere")):
        (thin / "job" / place).mkdir(exist_ok=True)
        given = with_config_dir([RUN, *DATA], thin / "job" / place)
        with pytest.raises(UserError, match=rf"\(--config-dir\) .*{place}: the job carries no file of it"):
            check_request(given, working_dir=thin / "job", carried=files)
