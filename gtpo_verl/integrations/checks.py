"""What only verl can tell about a run before Ray starts: its own validation, registered names, and a verdict from the verifier."""

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.config import files_of
from gtpo_verl.errors import UserError, did_you_mean, first_line, within
from gtpo_verl.verifiers.reward import close_pools

VERIFIER_TIMEOUT = 60.0  # seconds; one that judges in processes has to start them


def check_with_verl(config: DictConfig) -> None:
    """Check what only verl can tell: registered names, and a verdict from the verifier on the first prompt.

    Raises:
        UserError: the first thing that is wrong, and what to do about it.
    """
    from verl.trainer.ppo import core_algos

    _check_name("algorithm.adv_estimator", config.algorithm.adv_estimator, core_algos.ADV_ESTIMATOR_REGISTRY)
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    _check_name("actor_rollout_ref.actor.policy_loss.loss_mode", mode, core_algos.POLICY_LOSS_REGISTRY)
    if not config.reward.reward_model.enable:
        _check_verifier(config)


def _check_name(key: str, name: str, known: Iterable[str]) -> None:
    names = sorted(str(getattr(item, "value", item)) for item in known)
    if name in names:
        return
    raise UserError(f"{key}={name}: no such name{did_you_mean(name, names) or '.'} Known: {', '.join(names)}.")


def _check_verifier(config: DictConfig) -> None:
    """Ask the verifier for one verdict, on the first prompt with its own answer as the response."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    row = _first_row(config)
    if row is None:
        return
    try:
        verifier = get_custom_reward_fn(config) or default_compute_score
    except (FileNotFoundError, AttributeError, RuntimeError, ImportError, AssertionError) as error:
        raise UserError(f"reward.custom_reward_function could not be loaded: {first_line(error)}") from error
    arguments = {
        "data_source": row[config.data.reward_fn_key],
        "solution_str": str(row["reward_model"].get("ground_truth")),
        "ground_truth": row["reward_model"].get("ground_truth"),
        "extra_info": row.get("extra_info") or {},
    }
    try:
        result = within(VERIFIER_TIMEOUT, lambda: _call(verifier, arguments))
    except UserError:
        raise
    except TimeoutError as error:
        raise UserError(f"the verifier gave no verdict on the first prompt within {VERIFIER_TIMEOUT:.0f} s.") from error
    except NotImplementedError as error:
        raise UserError(
            f"verl has no verifier for data_source={arguments['data_source']!r}: choose verifier=answer or verifier=boxed, or name your "
            "own with reward.custom_reward_function.path=FILE.py and .name=FUNCTION."
        ) from error
    except Exception as error:
        raise UserError(
            f"the verifier fails on the first prompt with {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        close_pools()  # the run's own are in the reward workers
    if isinstance(result, dict) and result.get("verifier_failure"):
        raise UserError(
            f"the verifier comes to no verdict on the first prompt ({result['verifier_failure']}), whose right answer is "
            f"{arguments['ground_truth']!r:.80}: look at reward_model.ground_truth in data.train_files."
        )
    if isinstance(result, dict) and "acc" not in result:
        raise UserError(
            f"the verifier returns {', '.join(sorted(result))} and no verdict: add `acc` (1 for a correct answer, 0 for a wrong one) "
            "to the dict that it returns."
        )


def _call(verifier: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(verifier):
        return asyncio.run(verifier(**arguments))
    return verifier(**arguments)


def _first_row(config: DictConfig) -> dict[str, Any] | None:
    import pyarrow.parquet as pq

    file = files_of(config.data.train_files or config.data.val_files)[0]  # an evaluation has the latter alone
    if "://" in file or not file.endswith(".parquet"):
        return None
    return next(pq.ParquetFile(file).iter_batches(batch_size=1)).to_pylist()[0]
