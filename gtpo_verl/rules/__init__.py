"""What the configuration of a run must keep, in one place; `train`, `train --check`, `plan`, `submit`, `sweep`, `eval`,
`audit` and `traces` read it (`stages`), and say everything that they find at once.

A rule is a function `rule(config)` that yields a `gtpo_verl.problems.Problem` for each thing it finds, or a row in the
table of `ranges`. A module holds the rules of one concern, and lists them in `RULES`. What only verl can say is in
`integrations.checks`; checks of one value of ours are beside its dataclass. Nothing here is imported with the package:
`submit` needs the rules of data without torch.
"""
