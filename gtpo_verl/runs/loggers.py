"""Logs of a training by verl's loggers ``tensorboard`` and ``wandb``, read without a server.

TensorBoard's event files are read by TensorBoard itself. Weights & Biases keeps an offline run in a file of protocol
buffers framed as LevelDB frames its log; its package (0.31) has the messages and no reader of the frames.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError

Metrics = dict[int, dict[str, float]]  # by step
_EVENTS = "events.out.tfevents.*"
_BLOCK = 32_768  # bytes; a frame never crosses a block
_FRAME = struct.Struct("<IHB")  # checksum, length, and whether it is whole, the first, a middle or the last part
_FULL, _FIRST, _LAST = 1, 2, 4


def read_logger(path: Path) -> tuple[Metrics, dict[str, Any]] | None:
    """Read the metrics that TensorBoard or an offline run of Weights & Biases has logged, and the configuration, empty
    where the logger keeps none; None where there is neither log.

    ``path``: a directory with TensorBoard's event files; a directory ``offline-run-…`` of Weights & Biases, one that
    holds a single such directory, or its ``.wandb`` file. UserError: it has no step, or its package is not installed.
    """
    config: dict[str, Any] = {}
    if path.is_dir() and any(path.glob(_EVENTS)):
        metrics = _tensorboard(path)
    else:
        files = [path] if path.suffix == ".wandb" else []
        if path.is_dir():
            files = sorted({*path.glob("run-*.wandb"), *path.glob("offline-run-*/run-*.wandb")})
        if not files:
            return None
        if len(files) > 1:
            many = f"{path} holds {len(files)} runs of Weights & Biases"
            raise UserError(f"{many}: name the directory of one, offline-run-*.")
        metrics, config = _wandb(files[0])
    if not metrics:
        raise UserError(f"{path} holds no logged step: has the training logged its first step yet?")
    return metrics, config


def _tensorboard(directory: Path) -> Metrics:
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError as error:
        raise UserError(f"{directory} is TensorBoard's: pip install tensorboard to read it.") from error
    # 0 keeps every point; of steps that a resume repeats, TensorBoard drops the abandoned ones
    events = EventAccumulator(str(directory), size_guidance={SCALARS: 0}).Reload()
    metrics: Metrics = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            if math.isfinite(event.value):
                metrics.setdefault(event.step, {})[key] = event.value
    return metrics


def _wandb(file: Path) -> tuple[Metrics, dict[str, Any]]:
    try:
        from wandb.proto import wandb_internal_pb2 as messages
    except ImportError as error:
        raise UserError(f"{file} is of Weights & Biases: pip install wandb to read it.") from error
    metrics: Metrics = {}
    config: dict[str, Any] = {}
    for content in _frames(file):
        record: Any = messages.Record.FromString(content)  # type: ignore[attr-defined]
        for item in (*record.run.config.update, *record.config.update):
            config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        for item in record.history.item:
            value = json.loads(item.value_json)
            key = item.key or "/".join(item.nested_key)
            if isinstance(value, int | float) and math.isfinite(value) and not key.startswith("_"):
                metrics.setdefault(record.history.step.num, {})[key] = float(value)
    config.pop("_wandb", None)
    return metrics, config


def _frames(file: Path) -> Iterator[bytes]:
    """The messages of a ``.wandb`` file; where a crash has torn it, those before the tear."""
    content = file.read_bytes()
    if content[:4] != b":W&B":
        raise UserError(f"{file} is not a file of Weights & Biases.")
    position = 7  # behind the name, a magic number and the version
    parts = b""
    while position + _FRAME.size <= len(content):
        if _BLOCK - position % _BLOCK < _FRAME.size:  # too little room for a frame: the block ends with zeros
            position += _BLOCK - position % _BLOCK
            continue
        checksum, length, kind = _FRAME.unpack_from(content, position)
        position += _FRAME.size
        data = content[position : position + length]
        position += length
        if kind == 0 or zlib.crc32(bytes([kind]) + data) != checksum:
            return
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield parts
