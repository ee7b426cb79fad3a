"""Rules of the data files: they are there, and verl's data set can read them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.config import DATA_FILES, files_of
from gtpo_verl.data.table import open_table
from gtpo_verl.data.traces import check_traces
from gtpo_verl.errors import UserError
from gtpo_verl.problems import Problem, note


def data(config: DictConfig, keys: Sequence[str] = DATA_FILES) -> Iterator[Problem]:
    """Local files have the columns that verl reads, and enough rows for a batch."""
    if own_class := config.data.get("custom_cls", {}).get("path"):
        yield note(
            f"data.custom_cls.path={own_class}: your class reads the data, so that columns are not looked at and the "
            "verifier is not tried on them."
        )
        return
    for key in keys:
        files = config.data[key]
        if not files:
            columns = ", ".join(sorted(_columns(config)))
            yield Problem(f"no data: set data.{key}=FILE.parquet in verl's schema (columns {columns}).")
            continue
        local = [file for file in files_of(files) if "://" not in file]
        found = [problem for file in local for problem in _file(config, key, file)]
        yield from found
        if key == "train_files" and not found and local == files_of(files):
            yield from _enough(config, local)


def _columns(config: DictConfig) -> set[str]:
    return {config.data.prompt_key, config.data.reward_fn_key, "reward_model"}


def _file(config: DictConfig, key: str, file: str) -> Iterator[Problem]:
    place = f"data.{key}={file}"
    if Path(file).is_dir():
        yield Problem(f"{place} is a directory: name its files, in brackets: [A.parquet,B.parquet].")
        return
    if not Path(file).is_file():
        yield Problem(f"{place}: no such file.")
        return
    try:
        table = open_table(file)
    except UserError as error:
        yield Problem(f"data.{key}={error}")
        return
    if not len(table):
        yield Problem(f"{place} has no rows.")
        return
    names = table.schema.names
    missing = _columns(config) - {name for name in names if names.count(name) == 1}
    if missing:
        yield Problem(
            f"{place} lacks the column{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}; it has "
            f"{', '.join(table.schema.names)}."
        )
    else:
        faults = list(_schema_faults(table.schema, config.data.prompt_key, config.data.reward_fn_key))
        yield from (Problem(f"{place}: {what}") for what in faults)
        for column in () if faults else sorted(_columns(config)):
            if (row := table.empty_row(column)) is not None:
                yield Problem(f"{place}: row {row} (the first is 0) has no {column}: fill it in, or remove the row.")


def _enough(config: DictConfig, files: Sequence[str]) -> Iterator[Problem]:
    """The prompts for training make a batch; verl would divide by its number of batches, minutes after the start."""
    rows, most = sum(len(open_table(file)) for file in files), config.data.train_max_samples
    size, place = config.data.train_batch_size, f"data.train_files={', '.join(files)}"
    if rows < size:
        yield Problem(f"{place} has {rows} prompts, fewer than data.train_batch_size={size}.")
    elif 0 < most < size:
        yield Problem(f"data.train_max_samples={most} is below data.train_batch_size={size}.")


def _schema_faults(schema: Any, prompt_key: str, source_key: str) -> Iterator[str]:
    """What keeps verl from reading these columns, by their Arrow types."""
    import pyarrow as pa

    prompt, reward = schema.field(prompt_key).type, schema.field("reward_model").type
    messages = prompt.value_type if pa.types.is_list(prompt) or pa.types.is_large_list(prompt) else None
    if messages is None or not pa.types.is_struct(messages) or {"role", "content"} - {field.name for field in messages}:
        yield (
            f"{prompt_key} must be a list of messages, each with role and content; it is {prompt}. "
            "`gtpo-verl prepare-data` makes such files."
        )
    if not pa.types.is_struct(reward) or "ground_truth" not in {field.name for field in reward}:
        yield (
            f"reward_model must be a dict with ground_truth, the right answer; it is {reward}. "
            "`gtpo-verl prepare-data` makes such files."
        )
    if pa.types.is_nested(source := schema.field(source_key).type):
        yield f"{source_key} must be text, the name of its source; it is {source}."
    extra = schema.field("extra_info").type if "extra_info" in schema.names else pa.null()
    if not (pa.types.is_struct(extra) or pa.types.is_null(extra)):
        yield f"extra_info must be a dict, in which verl looks for index; it is {extra}. Name the column otherwise."


def guide_columns(config: DictConfig) -> Iterator[Problem]:
    """The guide's columns are there; `integrations.checks` reads them, once there is a tokenizer."""
    from gtpo_verl.algorithms.mixed_policy import guide_config  # imports torch, which `submit` does without

    guide, data = guide_config(config.algorithm.guide), config.data
    if guide.mode == "off" or guide.served or data.train_files is None or data.get("custom_cls", {}).get("path"):
        return
    for file in files_of(data.train_files):
        if "://" in file or any(_file(config, "train_files", file)):
            continue
        try:
            check_traces(file, limit=data.max_response_length, with_log_probs=guide.ratio == "phi")
        except UserError as error:
            yield Problem(str(error))


RULES = (data, guide_columns)
