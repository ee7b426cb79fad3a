"""The responses of a validation, read from TransferQueue while they are there: by the trainer's validations and by ``gtpo-verl eval``."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from gtpo_verl.evaluation import Sample, logged, summarize
from gtpo_verl.evaluation.records import Response, problem_key, to_sample
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.transfer_queue import parse_key, reward_info
from gtpo_verl.verifiers.answer import NO_ANSWER

Rows = list[tuple[str, Response]]


def read_responses(batch: KVBatchMeta, tokenizer: Any = None) -> Rows:
    """The responses in a batch of validation, with the uid of the prompt that each answers.

    Args:
        batch: keys ``uid_session_output`` as the agent loops write them; of a session with several outputs the last counts.
        tokenizer: if given, the responses carry their texts.
    """
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for position, key in enumerate(batch.keys):
        row = parse_key(key)
        rollout = (row.uid, row.session)
        last[rollout] = max(last.get(rollout, (-1, -1)), (row.output, position))
    positions = sorted(position for _, position in last.values())
    if not positions:
        return []
    keys = [batch.keys[position] for position in positions]
    fields = ["uid", "raw_prompt", "reward_model", "data_source", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    columns = [data.pop(field).tolist() for field in fields]
    texts = _texts(tokenizer, keys, batch.partition_id) if tokenizer else [None] * len(keys)
    rows = []
    for position, text, uid, prompt, reward, source, extra in zip(positions, texts, *columns, strict=True):
        verdict = reward_info(extra)
        problem = problem_key(list(prompt), reward["ground_truth"])
        length = int(batch.tags[position]["response_len"])
        acc = verdict.get("acc")
        acc = None if acc is None else float(acc)
        failure = str(verdict.get("verifier_failure") or "")
        rows.append((str(uid), Response(problem, str(source), acc, _answer(verdict), length, text, failure)))
    return rows


def _texts(tokenizer: Any, keys: list[str], partition: str) -> list[str]:
    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["responses"])
    return [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in data["responses"].unbind()]


def _answer(verdict: Mapping[str, Any]) -> str | None:
    """What the verifier read; None where it read nothing, for which DAPO's rule has a word of its own."""
    answer = verdict.get("pred")
    return None if answer is None or answer == NO_ANSWER else str(answer)


@contextmanager
def recorded(buffer: ReplayBuffer) -> Iterator[Rows]:
    """Collect the responses that the buffer hands to a validation; verl clears them before the validation returns."""
    rows: Rows = []
    sample = buffer.sample

    def sample_and_record(*args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict]:
        batch, metrics = sample(*args, **kwargs)
        rows.extend(read_responses(batch))
        return batch, metrics

    with temporarily(buffer, "sample", sample_and_record):
        yield rows


def validation_metrics(
    rows: Rows, expected: Mapping[tuple[str, str], int], limit: int, threshold: float
) -> dict[str, float]:
    """The figures of a validation as metrics; none where the verifier gives no verdict (``acc``).

    Args:
        rows: what :func:`recorded` collected.
        expected: samples asked for, by data source and uid of the prompt; those that never came count as wrong.
        limit: tokens at which a response is truncated.
        threshold: ``acc`` from which a response is correct.
    """
    if all(response.acc is None for _, response in rows):
        return {}
    samples = [to_sample(response, limit=limit, threshold=threshold) for _, response in rows]
    samples += missing_samples(rows, expected)
    return logged(summarize(samples))


def missing_samples(rows: Rows, expected: Mapping[tuple[str, str], int]) -> list[Sample]:
    """A failed sample for each that was asked for and never came."""
    came = Counter(uid for uid, _ in rows)
    problems = {uid: response.problem for uid, response in rows}
    return [
        Sample(problems.get(uid, uid), source, correct=False, failed=True)
        for (source, uid), count in expected.items()
        for _ in range(count - came[uid])
    ]


def limits(config: DictConfig) -> dict[str, Any]:
    """What turns a response into a sample: the limit on its tokens, and the verdict that counts as correct."""
    return {"limit": config.data.max_response_length, "threshold": config.algorithm.correct_threshold}
