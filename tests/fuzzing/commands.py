"""Whole commands in processes of their own, with hostile arguments, directories and files; none of them may train."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil

from fuzzing import PASSED, REFUSED, check
from fuzzing.run_files import write_sweep
from fuzzing.settings import VALUES
from fuzzing.values import TEXTS, as_json, odd, torn

LIMIT = 900.0  # seconds, on a machine that others use too
ALONE = 15.0  # seconds that a process may take to end after the command that started it
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h: what a command leaves behind becomes a child of this process

Arguments = Callable[[Random, Path, Path], list[str]]


def _place(rng: Random, directory: Path, sweep: Path) -> str:
    """A directory, file or name where a command expects one."""
    names = (
        "file",
        "dir",
        "binary.parquet",
        "text.jsonl",
        "model",
        "nothing",
        "file/below",
        "",
        ".",
        "/",
        "-x",
        "a" * 300,
    )
    odd_names = ("s3://bucket/x", "[bold]x[/bold]", "é\u202e", "~nobody/x", "x\ny", "/proc/self/mem", "/dev/null")
    runs = (sweep, sweep / "algo=dapo,seed=0", sweep / "algo=dapo,seed=0" / "metrics.jsonl")
    if rng.random() < 0.5:
        return str(rng.choice(runs))
    return str(rng.choice((*(directory / name for name in names), *odd_names)))


def _setting(rng: Random, directory: Path, sweep: Path) -> str:
    keys = (
        *("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "trainer.run_dir", "nope", "algorithm"),
        *("algo", "setting", "seed", "trainer.n_gpus_per_node", "data.train_batch_size", "data.max_response_length"),
        *("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.val_kwargs.n", "actor_rollout_ref.rollout.top_p"),
        *(
            "actor_rollout_ref.actor.optim.lr",
            "algorithm.gtpo.alpha1",
            "guards.bounds",
            "guards.stall_timeout",
            "++x.y",
        ),
        *("reward.custom_reward_function.path", "trainer.resume_mode", "trainer.resume_from_path", "verifier", "task"),
    )
    value = rng.choice((rng.choice(VALUES), as_json(_place(rng, directory, sweep)).decode()))
    return rng.choice((f"{rng.choice(keys)}={value}", f"{rng.choice(keys)}={value}", rng.choice(VALUES), "=", "a=b=c"))


def _several(rng: Random, make: Callable[..., str], *args: Path, most: int = 3) -> list[str]:
    return [make(rng, *args) for _ in range(rng.randrange(1, most + 1))]


def _report(rng: Random, directory: Path, sweep: Path) -> list[str]:
    output = ["--output", _place(rng, directory, sweep)] if rng.random() < 0.4 else []
    allow = ["--allow", rng.choice(("seed", "", "nope"))] if rng.random() < 0.3 else []
    return ["report", *_several(rng, _place, directory, sweep), *output, *allow]


def _prepare(rng: Random, directory: Path, sweep: Path) -> list[str]:
    options = rng.choice(([], ["--problem-column", "nope"], ["--style", "boxed"], ["--data-source", ""], ["--force"]))
    output = ["--output", _place(rng, directory, sweep)]
    return ["prepare-data", "parquet", *_several(rng, _place, directory, sweep, most=2), *output, *options]


def _plan(rng: Random, directory: Path, sweep: Path) -> list[str]:
    options = rng.choice(
        (["--measured", _place(rng, directory, sweep)], ["--assume", "x=nan"], ["--yield", "0"], ["--gpu-memory", "-1"])
    )
    return ["plan", *_several(rng, _setting, directory, sweep), *(options if rng.random() < 0.5 else [])]


def _train(rng: Random, directory: Path, sweep: Path) -> list[str]:
    sound = [f"actor_rollout_ref.model.path={directory / 'model'}", f"data.train_files={directory / 'rows.parquet'}"]
    return ["train", rng.choice(("--check", "--check", "--cfg")), *sound, *_several(rng, _setting, directory, sweep)]


# What each command is given; an evaluation's model never has weights, so that nothing starts.
MAKERS: dict[Arguments, int] = {
    _report: 8,
    _prepare: 5,
    _plan: 4,
    _train: 4,
    lambda rng, directory, sweep: ["status", _place(rng, directory, sweep)]: 4,
    lambda rng, directory, sweep: ["stop", _place(rng, directory, sweep)]: 2,
    lambda rng, directory, sweep: [
        "verify",
        _place(rng, directory, sweep),
        "--workers",
        rng.choice(("1", "0", "x")),
    ]: 3,
    lambda rng, directory, sweep: ["export", _place(rng, directory, sweep)]: 2,
    lambda rng, directory, sweep: ["eval", str(directory / "nothing"), _setting(rng, directory, sweep)]: 2,
    lambda rng, directory, sweep: ["audit", "--reanalyse", _place(rng, directory, sweep)]: 1,
    lambda rng, directory, sweep: [rng.choice(("nope", "", "--nope", "report", "status")), "--" + "x" * 9]: 1,
}


def commands(rng: Random, directory: Path) -> str:
    """A command ends by itself, without a stack trace; with an exit code other than 0 it says one line; nothing of it
    is left running.
    """
    sweep = write_sweep(rng, directory, sound=rng.random() < 0.5)
    _write_files(rng, directory)
    make = rng.choices(list(MAKERS), list(MAKERS.values()))[0]
    arguments = make(rng, directory, sweep)
    code, out, err, left = _run(arguments, directory)
    shown = f"{arguments}: exit code {code}\n{out[-500:]}\n{err[-3000:]}"
    check("Traceback" not in out + err, f"a stack trace of {shown}")
    check(not left, f"{left} left by {shown}")
    check(code in (0, 1, 2), f"ended by {shown}")
    if code != 2:
        return PASSED
    lines = [line for line in err.splitlines() if line.strip()]
    usage = lines[:1] and lines[0].startswith("usage:")  # argparse's own, of several lines
    check(lines and "error: " in lines[-1], f"no last line that begins with error: {shown}")
    check(usage or sum(line.startswith("error:") for line in lines) == 1, f"not one line: {shown}")
    return REFUSED


def _write_files(rng: Random, directory: Path) -> None:
    rows = b"\n".join(as_json({"problem": f"{number}+1", "answer": number}) for number in range(3))
    (directory / "dir").mkdir()
    (directory / "file").write_text(rng.choice(TEXTS))
    (directory / "text.jsonl").write_bytes(rng.choice((rows, torn(rng, rows), as_json(odd(rng)))))
    (directory / "binary.parquet").write_bytes(torn(rng, rows))
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_bytes(rng.choice((b"{}", torn(rng, b'{"model_type": "qwen2"}'))))


def _run(arguments: list[str], directory: Path) -> tuple[int | None, str, str, list[str]]:
    """Exit code (None: it took too long), stdout, stderr, and the command lines of what it left running."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    program = [sys.executable, "-m", "gtpo_verl.cli", *(text.replace("\x00", "") for text in arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": str(directory / "ray"), "COLUMNS": "100"}
    before = {child.pid for child in psutil.Process().children()}
    process = subprocess.Popen(
        program,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code = None
    orphans = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(orphans, timeout=ALONE)
    left = []
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(" ".join(child.cmdline())[:80])
            child.kill()
    return code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), left
