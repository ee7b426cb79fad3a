"""What a step of dynamic sampling has generated, and how many more prompts it needs. No verl, no TransferQueue."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Outcome = Literal["mixed", "all_correct", "all_wrong", "failed"]


class GroupVerdict(NamedTuple):
    """What became of a group; ``value`` is what its responses share, where they have one and no contrast."""

    outcome: Outcome
    value: float | None = None

    @classmethod
    def of(cls, values: list[float], *, failed: bool) -> "GroupVerdict":
        """Of the values of a group's responses; ``failed`` when one of its rollouts did."""
        if len(set(values)) > 1:
            return cls("mixed")
        if failed or not values:
            return cls("failed")
        return cls("all_correct" if values[0] > 0 else "all_wrong", values[0])


@dataclass(kw_only=True)
class Generation:
    """The groups that one step generates; a group is the responses to one prompt.

    unfiltered_until, ended_at: when the last prompt ended that a step without a filter would have generated, and the
    last of all (seconds).
    """

    number: int  # of the training step
    carried_in: int  # groups that waited when it began
    expired: int = 0  # groups that had waited too long by then
    missing: int  # groups with contrast to be found
    last_step: tuple[int, int]  # groups with contrast, and groups generated, in the last step that generated any
    window: int  # prompts in flight at most
    budget: int | None  # prompts in all at most
    prompts: list[str] = field(default_factory=list)  # those submitted in this step, in the order of the data
    verdicts: dict[str, GroupVerdict] = field(default_factory=dict)  # of those that have ended
    unfiltered_until: float | None = None
    ended_at: float = 0.0

    @property
    def inflight(self) -> int:
        """Prompts that have not ended."""
        return len(self.prompts) - len(self.verdicts)

    def note_time(self) -> None:
        """Note which prompts have ended by now."""
        self.ended_at = time.time()
        if self.unfiltered_until is None and self.verdicts.keys() >= set(self.prompts[: self.missing]):
            self.unfiltered_until = self.ended_at

    def count(self, outcome: Outcome) -> int:
        return sum(verdict.outcome == outcome for verdict in self.verdicts.values())

    def target(self) -> int:
        """Prompts that the step submits in all, as far as is known by now.

        After each prompt, in the order of the data, as many more are called for as are expected to fill the batch at
        the yield up to there, this step's and the last one's; the most counts. Groups that have not ended are taken to
        have contrast, so verdicts can only raise the number, whatever the order in which they come.
        """

        def called_for(with_contrast: int, generated: int) -> int:
            missing = self.missing - with_contrast
            if missing <= 0:
                return 0
            last_with_contrast, last_generated = self.last_step
            expected_yield = (with_contrast + last_with_contrast) / (generated + last_generated)
            return min(groups_to_generate(missing, expected_yield), self.window)

        with_contrast, target = 0, called_for(0, 0)
        for count, uid in enumerate(self.prompts, start=1):
            with_contrast += uid not in self.verdicts or self.verdicts[uid].outcome == "mixed"
            target = max(target, count + called_for(with_contrast, count))
        return target if self.budget is None else min(target, self.budget)

    def describe(self) -> str:
        carried = f", and {self.carried_in} carried over" if self.carried_in else ""
        return (
            f"{len(self.prompts)} groups generated: {self.count('mixed')} mixed, {self.count('all_correct')} all "
            f"correct, {self.count('all_wrong')} all wrong, {self.count('failed')} failed{carried}"
        )

    def metrics(self) -> dict[str, Any]:
        """Of the groups generated, and of the seconds that the filter added."""
        generated = len(self.prompts)
        found: dict[str, Any] = {
            "generated_groups": generated,
            "failed_groups": self.count("failed"),
            "expired_groups": self.expired,
        }
        if generated:  # a step that lives on carried groups alone has no yield
            found["yield"] = self.count("mixed") / generated
            found["solve_all_share"] = self.count("all_correct") / generated
            found["solve_none_share"] = self.count("all_wrong") / generated
        assert self.unfiltered_until is not None
        found["extra_generation_s"] = self.ended_at - self.unfiltered_until
        return found

    def shared_values(self) -> dict[float, int]:
        """{value: groups} of the groups without contrast, all of whose responses have this value."""
        return dict(Counter(verdict.value for verdict in self.verdicts.values() if verdict.value is not None))


def groups_to_train(kept: int, batch_size: int, mini_batch_size: int) -> int:
    """How many of the ``kept`` groups with contrast a step trains on: whole mini-batches, or all if there is not one.

    verl would fill the last mini-batch with padding rows, and under a token mean its tokens would weigh more.
    """
    if kept >= batch_size:
        return batch_size
    return kept - kept % mini_batch_size or kept


def groups_to_generate(missing: int, expected_yield: float) -> int:
    """How many groups to generate so that, more than four times in five, ``missing`` of them (1 or more) have contrast.

    With a share y = ``expected_yield`` in (0, 1], the number with contrast among n has mean n·y and standard deviation
    √(n·y·(1-y)); n is the least for which the mean is one standard deviation above ``missing``.
    """
    root = (math.sqrt(1 - expected_yield) + math.sqrt(1 - expected_yield + 4 * missing)) / 2
    return math.ceil(root**2 / expected_yield - 1e-9)
