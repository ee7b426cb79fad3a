"""Kills and faults on real trainings: does the same command go on, without a step lost, to the same weights?

    python tests/chaos.py --dir outputs/chaos --kills 50 --faults all --output chaos.json
    python tests/chaos.py --kills 3 --faults none --hours 0.5

A short training of the embedded task, 4 prompts of 4 responses a step and a checkpoint after every step, runs once
without interruption. Then it runs again and again, and its processes are killed by SIGKILL at random moments: every
kind of process in every state. What is saved after a kill is compared bit for bit with the reference. The faults are
those of tests/breaking/faults.py.

What is done is in --dir; Ctrl-C loses what is under way, and the same command goes on. Writes a table beside --output.
The exit code is 1 where a promise of docs/inside/reliability.md was broken. A full disk and a read-only directory need
root.
"""

import argparse
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from breaking import kills
from breaking.checks import last_saved
from breaking.faults import FAULTS, finish_problems, run_fault, said
from breaking.lab import Lab
from breaking.training import Attempt
from rich.progress import Progress

from gtpo_verl.files import read_json, write_json, write_text
from gtpo_verl.tasks.prepare import prepare_task
from gtpo_verl.tasks.sums.task import TASK

TESTS = Path(__file__).resolve().parent


class Chaos:
    """The state of a benchmark that can be interrupted."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.file = lab.directory / "state.json"
        empty = {
            "seed": seed,
            "steps": lab.steps,
            "reference": None,
            "kills": [],
            "tries": 0,
            "chains": [],
            "faults": [],
        }
        self.state: dict[str, Any] = read_json(self.file) or empty
        if (self.state["seed"], self.state["steps"]) != (seed, lab.steps):
            raise SystemExit(f"error: {self.file} is of another seed or number of steps: name another --dir")

    def save(self) -> None:
        write_json(self.file, self.state)

    def reference(self) -> None:
        """Train without interruption, once."""
        if self.state["reference"] is None:
            shutil.rmtree(self.lab.reference, ignore_errors=True)
            with self.lab.training(self.lab.reference, "trainer.max_actor_ckpt_to_keep=null") as attempt:
                ended = attempt.end(2 * self.lab.limit)
            if ended.code != 0:
                raise SystemExit(f"error: the reference ended with {said(ended)}")
            self.state["reference"] = {"seconds": ended.seconds, "lasting": {}, "seen": {}}
            self.learn(attempt)
            self.save()
        self.lab.lasting, self.lab.seen = (self.state["reference"][key] for key in ("lasting", "seen"))

    def learn(self, attempt: Attempt) -> None:
        """Note how long states last, from the last attempt that had them: a machine is not always as fast."""
        self.state["reference"]["lasting"] |= kills.lasting(attempt.phases)
        self.state["reference"]["seen"] |= attempt.seen

    # ------------------------------------------------------------ kills

    def chain(self) -> tuple[int, Path, list[dict[str, Any]]]:
        """The chain that is not finished: its number, directory and rows."""
        number = len(self.state["chains"])
        rows = [row for row in self.state["kills"] if row["chain"] == number]
        return number, self.lab.directory / f"chain-{number}", rows

    def kill(self) -> None:
        """One more kill, or the end of a chain that has no step left to be killed in."""
        number, run_dir, rows = self.chain()
        before = last_saved(run_dir)
        if before >= self.lab.steps - 1:
            self.finish_chain()
            return
        pairs = kills.order(self.state["seed"])
        tries = self.state["tries"]
        kind, state = pairs[tries % len(pairs)]
        row, attempt = kills.kill_one(self.lab, run_dir, kind, state, Random(f"{self.state['seed']}/{tries}"))
        self.state["tries"] += 1
        self.learn(attempt)
        kills.look_back(self.lab, run_dir, rows, attempt.phases, before)
        if row:
            self.state["kills"].append(row | {"chain": number})
        if any(row["problems"] for row in rows) or not row:
            self.finish_chain()
        self.save()

    def finish_chain(self) -> None:
        """Let the training of a chain end, and compare it with the reference."""
        _, run_dir, rows = self.chain()
        before = last_saved(run_dir)
        with self.lab.training(run_dir) as attempt:
            ended = attempt.end(2 * self.lab.limit)
        kills.look_back(self.lab, run_dir, rows, attempt.phases, before)
        problems = finish_problems(self.lab, run_dir, ended)
        self.state["chains"].append({"kills": len(rows), "ended": said(ended), "problems": problems})
        self.save()
        if not problems and not any(row["problems"] for row in rows):
            shutil.rmtree(run_dir)

    # ------------------------------------------------------------ faults

    def fault(self, name: str) -> None:
        """Break one thing."""
        began = time.monotonic()
        try:
            row = run_fault(self.lab, name)
        except Exception as error:  # of the fault's own: it says nothing about the training
            row = {"fault": name, "not_tried": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        self.state["faults"] = [one for one in self.state["faults"] if one["fault"] != name]  # not tried before
        self.state["faults"].append(row | {"seconds": round(time.monotonic() - began, 1)})
        self.save()


def chosen(names: list[str]) -> list[str]:
    """The faults that --faults names."""
    if names in (["all"], ["none"]):
        return list(FAULTS) if names == ["all"] else []
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise SystemExit(f"error: no such fault: {', '.join(unknown)}. There are: {', '.join(FAULTS)}")
    return names


def is_broken(state: dict[str, Any]) -> bool:
    """Whether something did not hold."""
    return any(row.get("problems") for part in ("kills", "chains", "faults") for row in state[part])


def summary(state: dict[str, Any]) -> str:
    """The counts, in words."""
    rows, chains = state["kills"], state["chains"]
    held = sum(not row["problems"] for row in rows)
    compared = [row["weights"]["difference"] for row in rows if "weights" in row]
    return (
        f"Kills: {len(rows)}; everything held after {held}. The weights that were saved next were the reference's, bit "
        f"for bit, after {compared.count(0.0)} and others after {len(compared) - compared.count(0.0)}; none were "
        f"compared after {len(rows) - len(compared)}. Trainings that were killed repeatedly and then came to their "
        f"end: {len(chains)}, {sum(not chain['problems'] for chain in chains)} of them with all steps logged once and "
        "the reference's weights."
    )


def table(state: dict[str, Any]) -> str:
    """What was tried and what came of it, as Markdown."""
    rows = state["kills"]
    lines = [
        "# Kills and faults on real trainings",
        "",
        f"Made by `python tests/chaos.py`: {state['steps']} steps of the embedded task, a checkpoint after each.",
        "",
        summary(state),
        "",
        "| process | " + " | ".join(kills.PHASES) + " |",
        "|---|" + "---|" * len(kills.PHASES),
    ]
    count = Counter((row["process"], row["state"], not row["problems"]) for row in rows)
    for kind in kills.KILLED:
        cells = [_cell(count[kind, phase, True], count[kind, phase, False]) for phase in kills.PHASES]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    lines += ["", "Kills by process and state in which they hit: how many held, and how many did not.", ""]
    lines += ["| killed | in | ended by | s | what did not hold |", "|---|---|---|---|---|"]
    for row in rows:
        end = row["ended"]
        how = "still running" if end["code"] is None else f"exit code {end['code']}"
        lines.append(
            f"| {row['process']} | step {row['step']}, {row['phase']} | {how}{_quoted(end['errors'])} | "
            f"{end['seconds']:.0f} | {_plain('; '.join(row['problems']))} |"
        )
    lines += ["", "| fault | state | expected | happened | s | what did not hold |", "|---|---|---|---|---|---|"]
    for row in state["faults"]:
        if "not_tried" in row:
            lines.append(f"| {row['fault']} | | | not tried: {_plain(row['not_tried'])} | | |")
            continue
        lines.append(
            f"| {row['fault']} | {row['state']} | {row['expected']} | {_plain(row['happened'])} | "
            f"{row['ended']['seconds']:.0f} | {_plain('; '.join(row['problems']))} |"
        )
    lines += ["", "Seconds: from the kill or the stall, else from the start, to the end of the command.", ""]
    return "\n".join(lines)


def _cell(held: int, broken: int) -> str:
    return " ".join([str(held)] * bool(held) + [f"**{broken} not**"] * bool(broken))


def _quoted(errors: list[str]) -> str:
    return f": {_plain(errors[0])}" if errors else ""


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:400]


def published(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The state without this machine's paths."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.replace(str(directory), "DIR").replace(str(TESTS), "TESTS") if isinstance(value, str) else value

    return dict(plain(state))


def main() -> int:
    """Break, compare, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("outputs/chaos"), help="of all runs (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=50, help="in all (default: %(default)s)")
    parser.add_argument("--faults", nargs="+", default=["all"], metavar="NAME", help="all, none, or these")
    parser.add_argument("--list", action="store_true", help="print the faults, and what is expected of each")
    parser.add_argument("--steps", type=int, default=12, help="of a training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument(
        "--hours", type=float, default=12.0, help="start nothing new after these (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, default=sys.maxsize, help="do at most so many of them in this call")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="for a training, then it is killed"
    )
    parser.add_argument("--lock", type=Path, help="hold this file's lock while a training runs")
    parser.add_argument("--output", type=Path, help="write the result as JSON, and a table beside it")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name}: {expected}" for name, (expected, _) in FAULTS.items()))
        return 0
    directory = args.dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    lab = Lab(directory, prepare_task(TASK, directory / "task"), args.steps, args.limit, args.lock)
    chaos = Chaos(lab, args.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the training under way is ended with it
    done = {row["fault"] for row in chaos.state["faults"] if "not_tried" not in row}
    faults = [name for name in chosen(args.faults) if name not in done]
    deadline = time.monotonic() + 3600 * args.hours
    left = args.trials
    try:
        with Progress(redirect_stdout=False, redirect_stderr=False) as progress:
            bar = progress.add_task("kills", total=args.kills, completed=len(chaos.state["kills"]))
            chaos.reference()
            while len(chaos.state["kills"]) < args.kills and left and time.monotonic() < deadline:
                chaos.kill()
                left -= 1
                progress.update(bar, completed=len(chaos.state["kills"]))
            bar = progress.add_task("faults", total=len(faults))
            while faults and left and time.monotonic() < deadline:
                chaos.fault(faults.pop(0))
                left -= 1
                progress.advance(bar)
            if left and chaos.chain()[2]:
                chaos.finish_chain()  # so that the last kills, too, are followed by weights
    finally:
        if args.output:
            result = published(chaos.state, directory)
            write_json(args.output, result)
            write_text(args.output.with_suffix(".md"), table(result))
    return int(is_broken(chaos.state))


if __name__ == "__main__":
    sys.exit(main())
