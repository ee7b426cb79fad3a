"""Responses of a guiding policy as columns of the training data (docs/guides/mixed-policy.md).

``guide_responses``: a list for each prompt, of texts or of lists of token ids, empty or null where there is none, as is
an empty text. Token ids are a whole response with its end; a text is what follows the student's prompt, which its chat
template renders.
``guide_log_probs``: a list of numbers for each response, one a token with the end, under the guide at the training
temperature.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gtpo_verl.data.table import open_table
from gtpo_verl.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

RESPONSES = "guide_responses"
LOG_PROBS = "guide_log_probs"
ROUND_OFF = 1e-3  # nats above 0 that a log-probability may have


@dataclass(frozen=True)
class Trace:
    """A response of the guide: its token ids with the end, and their log-probabilities under it where known."""

    ids: list[int]
    log_probs: list[float] | None


def token_ids(response: str | Sequence[int], tokenizer: Any) -> list[int]:
    """The tokens of a response: ids as they are; a text by the student's tokenizer, and its end-of-sequence token."""
    if not isinstance(response, str):
        return [int(token) for token in response]
    ids: list[int] = tokenizer.encode(response, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return ids if ids and ids[-1] == end else [*ids, end]


def traces_of(
    columns: Mapping[str, Any], tokenizer: Any, limit: int, seed: int, with_log_probs: bool = False
) -> list[Trace]:
    """The guide's responses to a prompt, from its columns, in an order drawn from a seed.

    tokenizer: the student's. limit: the most tokens of a response. with_log_probs: whether each response needs its
    log-probabilities. Raises UserError: a response cannot be used.
    """
    responses, log_probs = columns.get(RESPONSES), columns.get(LOG_PROBS)
    if responses is None:
        return []
    if log_probs is not None and len(log_probs) != len(responses):
        raise UserError(
            f"{LOG_PROBS} has {len(log_probs)} lists for {len(responses)} responses of the guide: each needs one"
        )
    found = []
    for number, response in enumerate(responses):
        if isinstance(response, str) and not response.strip():
            continue  # its tokens would be the end alone
        theirs = None if log_probs is None or log_probs[number] is None else list(log_probs[number])
        trace = Trace(token_ids(response, tokenizer), theirs)
        if with_log_probs and theirs is None:
            raise UserError(f"a response of the guide has no log-probabilities in {LOG_PROBS}: leave it out")
        if problem := _problem(trace, limit, len(tokenizer)):
            raise UserError(f"a response of the guide {problem}")
        found.append(trace)
    random.Random(seed).shuffle(found)
    return found


def check_traces(file: str, *, limit: int, with_log_probs: bool, tokenizer: Any = None) -> tuple[int, int]:
    """Check the guide's columns of a data file, before a run; the rest: see `traces_of`.

    tokenizer: without it columns and types alone are checked. Returns the number of prompts, and of those that have a
    response of the guide; without a tokenizer (0, 0). Raises UserError: the first problem, with its row.
    """
    table = open_table(file)
    key, schema = f"data.train_files={file}", table.schema
    if RESPONSES not in schema.names:
        raise UserError(
            f"{key} has no column {RESPONSES}, which algorithm.guide.source=traces reads: add one (a list of texts or "
            "of token ids for each prompt), or set algorithm.guide.mode=off."
        )
    if with_log_probs and LOG_PROBS not in schema.names:
        raise UserError(
            f"{key} has no column {LOG_PROBS}, by which algorithm.guide.ratio=phi divides: add the guide's "
            "log-probabilities, or set algorithm.guide.ratio=one and algorithm.guide.clip=none."
        )
    columns = [name for name in (RESPONSES, LOG_PROBS) if name in schema.names]
    for name in columns:
        if not _fits(name, schema.field(name).type):
            wanted = "texts or of lists of token ids" if name == RESPONSES else "lists of numbers"
            raise UserError(
                f"{key}: {name} must be a list of {wanted} for each prompt; it is {schema.field(name).type}."
            )
    if tokenizer is None:
        return 0, 0
    with_response = 0
    for number, row in enumerate(table.rows(columns)):
        try:
            with_response += bool(traces_of(row, tokenizer, limit, seed=0, with_log_probs=with_log_probs))
        except UserError as error:
            raise UserError(f"{key}, row {number}: {error}") from error
    if with_response == 0:
        raise UserError(f"{key}: {RESPONSES} is empty in every row.")
    return len(table), with_response


def _problem(trace: Trace, limit: int, vocabulary: int) -> str:
    """What is wrong with a response; empty where nothing is."""
    ids, log_probs = trace.ids, trace.log_probs
    if not ids:
        return "has no token: leave it out"
    if len(ids) > limit:
        return f"has {len(ids)} tokens, and data.max_response_length is {limit}: leave it out, or raise the limit"
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        return f"has token id {max(ids)}, and the model's tokenizer has {vocabulary}: it was written with another one"
    if log_probs is None:
        return ""
    if len(log_probs) != len(ids):
        return f"has {len(ids)} tokens with its end, and {len(log_probs)} log-probabilities in {LOG_PROBS}"
    if not all(math.isfinite(value) and value <= ROUND_OFF for value in log_probs):
        return f"has log-probabilities that are not finite or above 0 in {LOG_PROBS}"
    return ""


def _fits(column: str, kind: "pa.DataType") -> bool:
    """Whether a column is a list of lists of numbers, or, for responses, of texts."""
    import pyarrow as pa

    def is_list(outer: "pa.DataType") -> bool:
        return bool(pa.types.is_list(outer) or pa.types.is_large_list(outer))

    if not is_list(kind):
        return False
    inner = kind.value_type
    if pa.types.is_string(inner) or pa.types.is_large_string(inner):
        return column == RESPONSES
    wanted = pa.types.is_integer if column == RESPONSES else pa.types.is_floating
    return is_list(inner) and bool(wanted(inner.value_type))
