"""Verifiers: is the final answer of a response right? Rules, run in separate processes.

- ``answer``: DAPO's ``Answer:`` rule, string equality after normalisation.
- ``boxed``: Math-Verify, mathematical equality of the boxed answer.
- ``reasoning_gym``: the score of the generator that made the problem; on its own data alone.

``reward`` has the functions that verl calls, ``pool`` and ``server`` the processes, ``agreement`` compares the two
rules on a dump of responses.
"""

RULES = ("answer", "boxed")

# Why the rule gave no verdict: it took too long or too much memory, its process died, or it raised an exception.
FAILURES = ("timeout", "memory", "crash", "error")
