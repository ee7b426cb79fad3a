"""When a response is correct: the one definition that training, validation, `eval`, `verify` and reports share."""


def is_correct(acc: float | None, threshold: float) -> bool:
    """Whether a response is correct: its ``acc`` is at least ``algorithm.correct_threshold``.

    Args:
        acc: what the reward function returned beside ``score``. None (it returned none, or failed) and NaN are wrong.
        threshold: ``algorithm.correct_threshold`` of the run.
    """
    return acc is not None and acc >= threshold
