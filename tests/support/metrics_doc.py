"""The names in the tables of docs/reference/metrics.md, and which logged metrics have no row there."""

import re
from collections.abc import Iterable
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

# Metrics of verl that the document leaves out.
VERL = (
    r"actor/(lr|loss|entropy_loss|kl_\w+|reward_kl_\w+|perf/.*)",
    r"(critic|global_seqlen|num_turns|perf|response|response_length_non_aborted|separate_async|timing_\w+)/.*",
    r"(prompt_length|response_length)/(mean|max|min|clip_ratio)",
    r"(rollout|rollout_corr|spec_decode|tool_call_counts|variance_proxy)/.*",
    r"training/(epoch|global_step|num_turns/.*|off_policy/.*|rollout_failure/.*|rollout_(actor_)?probs_.*)",
    r"training/filter_groups/(evicted_samples|discarded_surplus_samples)",  # of the asynchronous trainer modes
)


def documented() -> list[str]:
    """The names in the first column of the tables, with their placeholders."""
    rows = [line.split("|")[1] for line in DOC.read_text().splitlines() if line.startswith("| `")]
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def undocumented(names: Iterable[str]) -> set[str]:
    """The names that neither have a row in docs/reference/metrics.md nor are verl's."""
    known = re.compile("|".join([*map(_pattern, documented()), *VERL]))
    return {name for name in names if not known.fullmatch(name)}


def _pattern(name: str) -> str:
    """SOURCE and NAME match anything, N and K numbers, and * the rest of the name."""
    pattern = re.escape(name).replace(r"\*", ".*")
    return re.sub(r"\b(SOURCE|NAME)\b", ".+", re.sub(r"@[NK]$", r"@\\d+", pattern))
