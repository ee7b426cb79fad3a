"""The metrics of a validation during training, from recorded responses; the end-to-end test compares them with verl's
own.
"""

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import get_tensordict

from gtpo_verl.evaluation.records import Problem, Response, problem_key
from gtpo_verl.integrations import validation
from gtpo_verl.integrations.validation import Validated, dump_columns, read_responses, recorded, validation_metrics


def response(problem: str, acc: float | None, *, answer: str | None = "7", length: int = 4) -> Response:
    return Response(problem, "sums", acc, answer, length)


def validated(rows: list[tuple[str, Response]], **without_response: str) -> Validated:
    problems = {uid: response.problem for uid, response in rows} | without_response
    return Validated({uid: Problem(key) for uid, key in problems.items()}, rows)


def test_metrics_of_a_validation() -> None:
    rows = [("u1", response("a", 1.0)), ("u1", response("a", 0.0, answer="8", length=8)), ("u2", response("b", 1.0))]
    rows.append(("u2", response("b", 1.0)))
    expected = {("sums", "u1"): 2, ("sums", "u2"): 2}
    metrics = validation_metrics(validated(rows), expected, limit=8, threshold=1.0)
    assert metrics["val/sums/mean@2"] == 0.75
    assert metrics["val/sums/pass@2"] == 1.0
    assert metrics["val/sums/maj@2"] == 0.75
    assert metrics["val/sums/response_length"] == 5
    assert metrics["val/sums/truncated_share"] == 0.25
    assert metrics["val/sums/failed_samples"] == 0


def test_samples_that_never_came_count_as_wrong_in_the_mean_over_problems() -> None:
    """A prompt with one response of two, and a prompt with none: a quarter is correct, not all of what came."""
    rows = [("u1", response("a", 1.0))]
    expected = {("sums", "u1"): 2, ("sums", "u2"): 2}
    metrics = validation_metrics(validated(rows, u2="b"), expected, limit=8, threshold=1.0)
    assert metrics["val/sums/mean@2"] == 0.25
    assert metrics["val/sums/problems"] == 2
    assert metrics["val/sums/failed_samples"] == 3


def test_rows_that_repeat_a_problem_are_one_problem() -> None:
    rows = [(f"u{i}", response("a", float(i % 4 == 0))) for i in range(32)]
    expected = {("sums", f"u{i}"): 1 for i in range(32)}
    metrics = validation_metrics(validated(rows), expected, limit=8, threshold=1.0)
    assert (metrics["val/sums/problems"], metrics["val/sums/mean@32"]) == (1, 0.25)


def test_a_verifier_without_verdicts_has_no_figures() -> None:
    without_acc = validated([("u1", response("a", None))])
    assert validation_metrics(without_acc, {("sums", "u1"): 1}, limit=8, threshold=1.0) == {}


def test_a_failed_sample_of_a_repeated_problem_belongs_to_that_problem() -> None:
    """AIME as its authors ship it, 30 problems in 32 rows each and one sample per row, with one failure."""
    rows = [(f"u{p}-{r}", response(f"p{p}", float(r < 10))) for p in range(30) for r in range(32)]
    expected = {("sums", uid): 1 for uid, _ in rows}
    uid, lost = rows.pop(0)
    metrics = validation_metrics(validated(rows, **{uid: lost.problem}), expected, limit=8, threshold=1.0)
    assert (metrics["val/sums/problems"], metrics["val/sums/failed_samples"]) == (30, 1)
    assert metrics["val/sums/mean@32"] == pytest.approx((30 * 10 - 1) / (30 * 32))


def test_the_last_output_of_a_session_is_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent loop may write several outputs a session; keys are ``uid_session_output`` and arrive in any order."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys = ["u_0_10", "u_1_0", "u_0_2"]
    rows = {
        key: {
            "uid": "u",
            "data_source": "sums",
            "extra_fields": {"reward_extra_info": {"acc": acc, "pred": pred, "verifier_failure": ""}},
        }
        for key, acc, pred in zip(keys, (1.0, 0.0, 0.0), ("1", "[INVALID]", "3"), strict=True)
    }

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        return list_of_dict_to_tensordict([{field: rows[key][field] for field in select_fields} for key in keys])

    monkeypatch.setattr(validation.tq, "kv_batch_get", get)
    tags = [{"response_len": length} for length in (5, 6, 7)]
    read = read_responses(KVBatchMeta(partition_id="val", keys=keys, tags=tags), {"u": Problem("1?")})
    assert [(uid, r.acc, r.answer, r.length) for uid, r in read] == [("u", 1.0, "1", 5), ("u", 0.0, None, 6)]
    assert [r.problem for _, r in read] == ["1?", "1?"]


def test_buffer_and_agents_are_unchanged_after_a_validation() -> None:
    batch = KVBatchMeta(partition_id="val", keys=[], tags=[])

    class Buffer:
        def sample(self, batch_size: int) -> tuple[KVBatchMeta, dict[str, int]]:
            return batch, {"seen": batch_size}

    class Agents:
        def generate_sequences(self, prompts: Any) -> int:
            return len(prompts)

    buffer: Any = Buffer()
    agents: Any = Agents()
    prompt = [{"role": "user", "content": "1?"}]
    columns = {"uid": ["u", "v"], "raw_prompt": [prompt] * 2, "reward_model": [{"ground_truth": "1"}] * 2}
    rollout = {"rollout": {"name": "vllm"}}
    config = OmegaConf.create({"seed": 0, "trainer": {"seed_requests": True}, "actor_rollout_ref": rollout})
    with recorded(buffer, agents, config) as found:
        assert agents.generate_sequences(get_tensordict(columns)) == 2
        assert buffer.sample(batch_size=2) == (batch, {"seen": 2})
    assert found == Validated(dict.fromkeys("uv", Problem(problem_key(prompt, "1"))), [])
    assert not {*vars(buffer), *vars(agents)}
    with pytest.raises(RuntimeError, match="torn"), recorded(buffer, agents, config):
        raise RuntimeError("torn")
    assert not {*vars(buffer), *vars(agents)}


def test_problems_of_a_cluster_are_resampled_together() -> None:
    """Two clusters of 20 problems, one solved and one not: the interval is that of two things, not of forty."""
    rows = [
        (f"u{i}", Response(f"p{i}", "sums", float(i < 20), "7", 4, cluster="right" if i < 20 else "wrong"))
        for i in range(40)
    ]
    expected = {("sums", uid): 1 for uid, _ in rows}
    clustered = validation_metrics(validated(rows), expected, limit=8, threshold=1.0)
    apart = [(uid, replace(response, cluster=None)) for uid, response in rows]
    single = validation_metrics(validated(apart), expected, limit=8, threshold=1.0)
    assert clustered["val/sums/mean@1"] == single["val/sums/mean@1"] == 0.5
    assert (clustered["val/sums/mean@1/ci_low"], clustered["val/sums/mean@1/ci_high"]) == (0.0, 1.0)
    assert single["val/sums/mean@1/ci_low"] > 0.3


def test_the_dump_names_source_and_cluster_of_each_line() -> None:
    rows = [("u1", Response("a", "sums", 1.0, "7", 4, cluster="1+2")), ("u2", Response("b", "aime", 0.0, "8", 4))]
    columns = dump_columns(validated(rows), ["u2_0_0", "u1_0_0", "u1_1_0"])
    assert columns == {"data_source": ["aime", "sums", "sums"], "cluster": [None, "1+2", "1+2"]}
