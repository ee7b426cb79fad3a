"""The metrics that papers report: mean@k, unbiased pass@k, maj@k, response length, truncation, with their intervals.

Neither verl nor Ray nor vLLM is needed.
"""
