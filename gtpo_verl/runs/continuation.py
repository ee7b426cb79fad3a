"""Whether a command goes on with the training that its run directory holds, or would make another one of it.

What a run was trained with is its ``config.yaml`` and the checksums in ``run.json``, both of the last attempt.
"""

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl import seeds
from gtpo_verl.files import reading
from gtpo_verl.runs.directory import (
    CONFIG_FILE,
    NOT_SET,
    changed,
    flatten,
    in_words,
    is_bookkeeping,
    parse_config,
    read_config,
    read_record,
    within,
)
from gtpo_verl.runs.provenance import FILE_KEYS, checksums, run_versions

ALLOWED = "trainer.allow_changes"
_KINDS = ("gtpo_verl", "verl")  # another version of one has other keys
_MOST_NAMED = 5
# Settings that may change from attempt to attempt, as patterns of fnmatch, beside names, directories and addresses:
# they decide how long, how fast, where and how closely watched it is trained, and not what is learnt in a step.
FREE = (
    *("trainer.total_*", "*.optim.total_training_steps", "trainer.*_freq", "trainer.val_*", "trainer.log*"),
    *("trainer.max_*_ckpt_to_keep", "trainer.*_ckpt_*", "*.checkpoint.*", "trainer.esi_*", ALLOWED),
    *("guards.*", "ray_kwargs.*", "transfer_queue.*", "global_profiler.*", "*.profiler.*", "*.trace.*"),
    *("*.prometheus.*", "*.sandbox_fusion.*"),
    # devices and layout
    *("trainer.device", "*.nnodes", "*.n_gpus_per_node", "*_parallel_size", "*num_workers", "*_workers"),
    *("model_engine", "*.strategy", "*.fsdp_config.*", "*.megatron.*", "*.dtype", "*offload", "trainer.balance_batch"),
    # batching on a device, kernels, memory
    *("*micro_batch_size*", "*use_dynamic_bsz", "*_token_len_per_gpu", "*use_remove_padding", "*use_fused_kernels"),
    *("*use_torch_compile", "*enable_gradient_checkpointing", "*attn_implementation", "*entropy_from_logits_*"),
    *("*entropy_checkpointing", "*.pad_to_length*", "*.checkpoint_engine.*", "*.engine_kwargs.*", "*.load_format"),
    *("*.gpu_memory_utilization", "*.enforce_eager", "*.cudagraph_capture_sizes", "*.free_cache_engine"),
    *("*.max_num_batched_tokens", "*.max_num_seqs", "*.enable_chunked_prefill", "*.enable_prefix_caching"),
    *("*.enable_sleep_mode", "*.disable_log_stats", "*.layered_summon", "*.multi_stage_wake_up", "*.poll_interval"),
)
# Of these, what is taken from a checkpoint, and what changes Megatron's loss.
_NOT_FREE = ("*.checkpoint.load_contents", *(f"*.override_transformer_config.{name}" for name in ("*dropout", "moe_*")))

# What verl takes from the checkpoint, with the state of optimizer and scheduler, whatever the command says.
RESTORED = ("*.optim.lr", "*.optim.weight_decay", "*.optim.betas")
Changes = Mapping[str, tuple[Any, Any]]


def decides(key: str) -> bool:
    """Whether a dotted key decides what is trained."""
    free = _matches(key, FREE) and not _matches(key, _NOT_FREE)
    return not is_bookkeeping(key) and not free


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def changes(run_dir: Path, config: DictConfig, *, contents: bool = True) -> Changes:
    """{key: (before, now)} of what a run directory was trained with and a configuration would go on with.

    Names and places are left out, and what only follows from another key. Empty where nothing was trained. ``config``:
    composed and prepared, interpolations unresolved. ``contents``: whether data, model and reward function are compared
    by content, which is read then, or by path.
    """
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        return {}
    record = read_record(run_dir)
    with reading(file):
        trained = dict(flatten(read_config(file)))
        recorded = dict(record.get("checksums") or {})
        versions = dict(record.get("versions") or {})
    written: Any = OmegaConf.to_container(config, resolve=False)
    now, text = dict(flatten(parse_config(OmegaConf.to_yaml(config, resolve=True)))), dict(flatten(written))
    found = changed(trained, now)
    if any(versions.get(name, here) != here for name, here in run_versions().items() if name in _KINDS):
        found = {key: pair for key, pair in found.items() if NOT_SET not in pair}
    own = {key: pair for key, pair in found.items() if not (is_bookkeeping(key) or _follows(key, text, found))}
    sums = checksums(now) if contents else {}
    for key in FILE_KEYS:
        before, here = recorded.get(key), sums.get(key)
        if key in own and before and before == here:
            del own[key]
        elif key not in own and before and here and before != here:
            own[key] = (now[key], f"{now[key]} with other content")
    return own


def _follows(key: str, text: Mapping[str, Any], found: Collection[str]) -> bool:
    """Whether a value is taken from a key that has changed."""
    if key == ALLOWED or key.endswith(f".{seeds.VARIABLE}"):  # `gtpo_verl.config.prepare` sets the latter
        return True
    written = text.get(key)
    return isinstance(written, str) and "${" in written and any(key in found for key in re.findall(r"[\w.]+", written))


def refusal(found: Changes, allowed: Collection[str]) -> str | None:
    """What is said of changes that make another training of it and are not ``allowed``, by key or section, or None."""
    restored = {key: found[key] for key in found if _matches(key, RESTORED)}
    if restored:
        return (
            f"{in_words(restored)}: verl restores optimizer and schedule from the checkpoint, so the change would have "
            "no effect. Restore it, or begin another run from these weights, with "
            "actor_rollout_ref.model.path=RUN/model and a directory of its own."
        )
    other = [key for key in found if decides(key) and not within(key, allowed)]
    if not other:
        return None
    more = f" and {len(other) - _MOST_NAMED} more" if len(other) > _MOST_NAMED else ""
    keys = other if not more else list(dict.fromkeys(key.split(".")[0] for key in other))
    return (
        f"it was trained with other settings ({in_words({key: found[key] for key in other[:_MOST_NAMED]})}{more}), "
        "and would become another training. Restore them, or choose another directory; where it is meant, add "
        f"--allow-changes {','.join([*allowed, *keys])}, which its record and reports will state."
    )


def changed_settings(record: Mapping[str, Any]) -> Iterator[str]:
    """What a report says of a run whose attempts were not trained with the same settings, a sentence each."""
    for attempt in record.get("attempts") or ():
        found = {key: pair for key, pair in (attempt.get("changes") or {}).items() if decides(key)}
        if found:
            yield f"from step {attempt['from_step'] + 1} on it was trained with other settings: {in_words(found)}"
