"""Stands for a training where only its scheduling is tested: a real run directory, lock, record and metrics, and no
model. `python fake_training.py OVERRIDES...` reads `trainer.run_dir` and the keys `+fake.*` of its overrides:

steps: how many it takes, each of `seconds`; it goes on from the last one that it has logged.
fail_at: raises at that step, in the first `failures` attempts.
"""

import json
import sys
import time
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from gtpo_verl.errors import UserError, main_guard
from gtpo_verl.runs.directory import STOP_FILE, record_metrics
from gtpo_verl.runs.session import training_session
from gtpo_verl.runs.state import state_of

STARTS = "starts.jsonl"  # one line for every attempt that had the lock


def main() -> int:
    values = {item.key_or_group: item.value() for item in OverridesParser.create().parse_overrides(sys.argv[1:])}
    run_dir = Path(str(values["trainer.run_dir"]))
    steps, seconds = int(values.get("fake.steps", 3)), float(values.get("fake.seconds", 0.05))
    with training_session(run_dir, config=f"trainer: {{total_training_steps: {steps}}}\n", command="fake"):
        attempts = (run_dir / STARTS).read_text().count("\n") if (run_dir / STARTS).exists() else 0
        with (run_dir / STARTS).open("a") as starts:
            starts.write(json.dumps({"from": state_of(run_dir).step}) + "\n")
        for step in range(state_of(run_dir).step + 1, steps + 1):
            if step == values.get("fake.fail_at") and attempts < int(values.get("fake.failures", 99)):
                raise UserError(f"step {step} went wrong.")
            time.sleep(seconds)
            record_metrics(run_dir, step, {"timing_s/step": seconds, "val/sums/mean@1": step / steps})
            if (run_dir / STOP_FILE).exists():
                break
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
