"""The metrics that papers report: mean@k, unbiased pass@k, maj@k, response length, truncation, with their intervals.

Its functions need NumPy, and neither verl nor Ray nor vLLM.
"""

from gtpo_verl.evaluation.metrics import majority_at_k, pass_at_k, powers_of_two
from gtpo_verl.evaluation.summary import Figure, Sample, SourceSummary, logged, paired_changes, summarize

__all__ = [
    "Figure",
    "Sample",
    "SourceSummary",
    "logged",
    "majority_at_k",
    "paired_changes",
    "pass_at_k",
    "powers_of_two",
    "summarize",
]
