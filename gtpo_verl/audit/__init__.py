"""How well the credit that methods assign agrees with the true advantage of each step, measured by sampling.

The value V(t) of a prefix is the probability that a continuation by the same policy is correct; the true advantage of a
step is the value behind it minus the value before it (docs/guides/audit.md). Values are estimated from continuations in
two independent halves, so that no figure mistakes sampling noise for signal.
"""
