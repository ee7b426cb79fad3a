"""Reads a validation's responses from TransferQueue before verl clears them, for the trainer and ``gtpo-verl eval``."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from gtpo_verl.evaluation.records import Problem, Response, to_sample
from gtpo_verl.evaluation.summary import Sample, logged, summarize
from gtpo_verl.integrations.streams import assign_streams
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.transfer_queue import VALIDATION, last_outputs, parse_key, reward_info
from gtpo_verl.verifiers.answer import NO_ANSWER

Rows = list[tuple[str, Response]]


@dataclass(frozen=True)
class Validated:
    """What one validation asked for and what came back.

    ``problems``: the problem of each prompt submitted, by the prompt's uid. verl gives every row of the data a uid of
    its own, so a problem that the data repeats has several. ``rows``: the responses, each with the uid of its prompt.
    """

    problems: dict[str, Problem] = field(default_factory=dict)
    rows: Rows = field(default_factory=list)


def read_responses(batch: KVBatchMeta, problems: Mapping[str, Problem], tokenizer: Any = None) -> Rows:
    """Read the responses in a validation batch, each with the uid of its prompt.

    batch: keys ``uid_session_output`` as the agent loops write them; the last output of a session is its response.
    problems: the problem of each prompt, by uid.
    tokenizer: if given, the responses carry their texts.
    """
    positions = sorted(set(last_outputs(batch.keys)))
    if not positions:
        return []
    keys = [batch.keys[position] for position in positions]
    fields = ["uid", "data_source", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    columns = [data.pop(field).tolist() for field in fields]
    texts: list[str | None] = [None] * len(keys)
    if tokenizer:
        tokens = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["responses"])["responses"]
        texts = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in tokens.unbind()]
    rows = []
    for position, text, uid, source, extra in zip(positions, texts, *columns, strict=True):
        verdict = reward_info(extra)
        length = int(batch.tags[position]["response_len"])
        acc, pred = verdict.get("acc"), verdict.get("pred")
        acc = None if acc is None else float(acc)
        answer = None if pred is None or pred == NO_ANSWER else str(pred)  # which DAPO's rule reports as [INVALID]
        failure = str(verdict.get("verifier_failure") or "")
        problem = problems[str(uid)]
        response = Response(problem.key, str(source), acc, answer, length, text, failure, cluster=problem.cluster)
        rows.append((str(uid), response))
    return rows


@contextmanager
def recorded(buffer: ReplayBuffer, agents: Any, config: DictConfig) -> Iterator[Validated]:
    """Record the prompts that a validation submits to the trainer's agent loop manager and the responses in its replay
    buffer, before verl clears them; a prompt whose samples all fail leaves none.

    Every validation samples the same row of the data from the same streams (but with `data.validation_shuffle`): what
    differs is the model.
    """
    validated = Validated()
    sample, generate = buffer.sample, agents.generate_sequences

    def sample_and_record(*args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict]:
        batch, metrics = sample(*args, **kwargs)
        validated.rows.extend(read_responses(batch, validated.problems))
        return batch, metrics

    def record_and_generate(prompts: TensorDict) -> Any:
        first = len(validated.problems)
        validated.problems.update(submitted_problems(prompts))
        assign_streams(prompts, config, VALIDATION, range(first, first + len(prompts)))
        return generate(prompts)

    with (
        temporarily(buffer, "sample", sample_and_record),
        temporarily(agents, "generate_sequences", record_and_generate),
    ):
        yield validated


class ValidatingTrainer(PPOTrainer):
    """Adds to verl's validations their metrics by problem, and the columns that its dump lacks."""

    _validated: Validated

    def _validate(self) -> dict[str, float]:
        with recorded(self.replay_buffer, self.agent_loop_manager, self.config) as self._validated:
            return super()._validate()

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Any,
        sample_turns: Any,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts
        )
        limit, threshold = self.config.data.max_response_length, self.config.algorithm.correct_threshold
        return metrics | validation_metrics(self._validated, expected_acc_counts or {}, limit, threshold)

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict[str, Any], dump_path: str
    ) -> None:
        columns = reward_extra_infos_dict
        if dump_path == self.config.trainer.validation_data_dir:  # training rollouts have a directory of their own
            columns = columns | dump_columns(self._validated, columns["uid"])
        super()._dump_generations(inputs, outputs, gts, scores, columns, dump_path)


def submitted_problems(prompts: TensorDict) -> dict[str, Problem]:
    """The problem of each prompt in a batch for verl's agent loops, by uid."""
    columns = [list(prompts[name]) for name in ("uid", "raw_prompt", "reward_model")]
    # verl's own dataset always has the column; data.custom_cls may not
    extras = list(prompts["extra_info"]) if "extra_info" in set(prompts.keys()) else [None] * len(columns[0])
    return {
        str(uid): Problem.of(prompt, reward["ground_truth"], extra)
        for uid, prompt, reward, extra in zip(*columns, extras, strict=True)
    }


def dump_columns(validated: Validated, keys: Sequence[str]) -> dict[str, list[str | None]]:
    """What verl's dump of a validation lacks, one value per line of it, which have these row keys: the data source and
    the cluster.
    """
    by_uid = dict(validated.rows)
    responses = [by_uid[parse_key(key).uid] for key in keys]
    return {
        "data_source": [response.data_source for response in responses],
        "cluster": [response.cluster for response in responses],
    }


def validation_metrics(
    validated: Validated, expected: Mapping[tuple[str, str], int], limit: int, threshold: float
) -> dict[str, float]:
    """The results of a validation as metrics; empty where the reward function returns no ``acc``.

    expected: number of samples requested, by data source and uid of the prompt; samples that never came are wrong.
    limit: response length in tokens from which a response is truncated.
    threshold: ``acc`` from which a response is correct.
    """
    if all(response.acc is None for _, response in validated.rows):
        return {}
    samples = [to_sample(response, limit=limit, threshold=threshold) for _, response in validated.rows]
    came = Counter(uid for uid, _ in validated.rows)
    for (source, uid), count in expected.items():
        problem = validated.problems[uid]
        failed = Sample(problem.key, source, correct=False, failed=True, cluster=problem.cluster)
        samples += [failed] * (count - came[uid])
    return logged(summarize(samples))
