"""What the configuration of a run must keep, in one place: the commands ask for it (`stages`), and say all at once.

A module holds the rules of one concern in `RULES`, functions `rule(config)` that yield a `gtpo_verl.problems.Problem`
for each thing they find. What only verl can say is in `integrations.checks`; checks of one value of ours are beside its
dataclass. Nothing here is imported with the package: `submit` needs the rules of data without torch.
"""
