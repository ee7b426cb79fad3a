"""Verifiers: is the final answer of a response right? Two rules, judged in processes of their own.

- ``answer``: DAPO's ``Answer:`` rule, string equality after normalisation.
- ``boxed``: Math-Verify, mathematical equality of the boxed answer.

``reward`` is what verl calls, ``pool`` the processes, ``command`` compares the two rules on a dump of responses.
"""

RULES = ("answer", "boxed")

# Why a sample has no verdict of the rule: it took too long, too much memory, its process died, the rule raised an exception.
FAILURES = ("timeout", "memory", "crash", "error")
