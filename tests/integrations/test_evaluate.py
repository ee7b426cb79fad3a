"""The loop of an evaluation when things go wrong, on a queue in memory; the end-to-end test runs it on the real one.

Failures and interruptions at a given response cannot be provoked in real servers, so the servers are stood in for here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import ProblemFile, ProblemRecord
from gtpo_verl.integrations import evaluate as module
from gtpo_verl.integrations import transfer_queue, validation
from gtpo_verl.tasks.model import build_tokenizer

SAMPLES = 2


def test_a_validation_set_whose_prompts_are_all_left_out_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    prompt = [{"role": "user", "content": "1+2"}]
    row = {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "3"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "val.parquet")
    given = [f"actor_rollout_ref.model.path={tmp_path / 'model'}", f"data.val_files={tmp_path / 'val.parquet'}"]
    given += ["setting=quickstart", "hardware=cpu", "data.filter_overlong_prompts=true"]
    assert len(module.Problems(compose_config(given))) == 1
    with pytest.raises(UserError, match=r"no prompt fits in data\.max_prompt_length=2 tokens: raise it"):
        module.Problems(compose_config([*given, "data.max_prompt_length=2"]))


class Queue:
    """What the loop uses of TransferQueue, and agents that answer at once; prompts whose row is in ``failing`` lose a
    response.
    """

    def __init__(self, failing: set[int]) -> None:
        self.failing = failing
        self.tags: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.most_in_flight = 0
        self.submitted: list[int] = []
        self.agent_loop_workers: list[Any] = []  # whom a failure's cause is asked of

    def generate_sequences(self, prompts: dict[str, int]) -> None:
        for uid, row in prompts.items():
            self.submitted.append(row)
            came = SAMPLES - (row in self.failing)
            for session in range(came):
                key = f"{uid}_{session}_0"
                self.tags[key] = {"status": "success", "response_len": 3}
                self.rows[key] = {
                    "uid": uid,
                    "data_source": "sums",
                    "extra_fields": {"reward_extra_info": {"acc": 1.0, "pred": str(row)}},
                    "responses": [row],
                }
            self.tags[uid] = {"status": "finished" if came == SAMPLES else "failure", "is_prompt": True}
        self.most_in_flight = max(self.most_in_flight, sum("is_prompt" in tag for tag in self.tags.values()))

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return {partition_id: dict(self.tags)} if self.tags else {}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[key]

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        import torch
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        rows = [{field: self.rows[key][field] for field in select_fields} for key in keys]
        if select_fields == ["responses"]:
            rows = [{"responses": torch.tensor(row["responses"])} for row in rows]
        return list_of_dict_to_tensordict(rows)


class Problems:
    """Rows that are their own numbers."""

    class tokenizer:  # noqa: N801
        @staticmethod
        def decode(ids: list[int], skip_special_tokens: bool) -> str:
            return f"#{ids[0]}"

    def batch(self, rows: dict[str, int]) -> dict[str, int]:
        return rows

    def record(self, row: int) -> ProblemRecord:
        return ProblemRecord(row, f"p{row}", "sums", str(row), str(row), 0, ())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Evaluate rows with some of them failing; returns the queue and what was kept."""

    def run(rows: list[int], failing: set[int], keep: Any, *, failures_as_wrong: bool = False) -> Queue:
        queue = Queue(failing)

        @contextmanager
        def servers(config: Any, *, wait: bool) -> Iterator[tuple[Queue, int]]:
            yield queue, 1

        monkeypatch.setattr(module, "servers", servers)
        monkeypatch.setattr(module, "POLL", 0.0)
        monkeypatch.setattr(module, "tq", queue)
        monkeypatch.setattr(validation, "tq", queue)
        monkeypatch.setattr(transfer_queue, "tq", queue)
        config = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "rollout": {"val_kwargs": {"n": SAMPLES}, "max_num_seqs": 4, "agent": {"num_workers": 1}}
                }
            }
        )
        problems: Any = Problems()
        module.evaluate(config, problems, rows, keep, failures_as_wrong=failures_as_wrong, wait=False)
        return queue

    return run


def test_rows_are_answered_in_order_with_a_bounded_number_in_flight(run: Any) -> None:
    kept: list[ProblemRecord] = []
    queue = run([5, 3, 9, *range(20, 40)], set(), kept.append)
    assert queue.submitted == [5, 3, 9, *range(20, 40)]
    assert queue.most_in_flight == 4  # twice four sequences, two samples a prompt
    assert [record.row for record in kept] == queue.submitted
    assert [response.text for response in kept[1].responses] == ["#3", "#3"]
    assert all(record.failed == 0 for record in kept)
    assert queue.tags == {}, "TransferQueue must not fill up"


def test_a_failure_ends_the_evaluation_with_what_was_in_flight_kept(run: Any) -> None:
    kept: list[ProblemRecord] = []
    with pytest.raises(
        UserError, match=r"failed on 1 problems \(rows 2\), the last one: .*Repeat the command.*--failures-as-wrong"
    ):
        run(list(range(12)), {2}, kept.append)
    assert [record.row for record in kept] == [0, 1, 3]


def test_failures_count_as_wrong_where_that_is_asked_for(run: Any) -> None:
    kept: list[ProblemRecord] = []
    run(list(range(6)), {2, 4}, kept.append, failures_as_wrong=True)
    assert [record.failed for record in kept] == [0, 0, 1, 0, 1, 0]
    samples = kept[2].samples(limit=8, threshold=1.0)
    assert [(sample.correct, sample.failed) for sample in samples] == [(True, False), (False, True)]


def test_an_interruption_keeps_what_is_finished(run: Any, tmp_path: Path) -> None:
    file = ProblemFile(tmp_path / "problems.jsonl")

    def keep(record: ProblemRecord) -> None:
        if record.row == 7:
            raise KeyboardInterrupt
        file.add(record)

    with pytest.raises(KeyboardInterrupt):
        run(list(range(12)), set(), keep)
    assert sorted(ProblemFile(tmp_path / "problems.jsonl").records) == list(range(7))
