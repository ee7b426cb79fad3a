"""Seeds faults one at a time in a copy of the package and checks that the tests named for each fail.

``python tests/seeded_faults.py [NAME...] [--tests DIR]``; `make test-faults` runs all. The named tests first run on the
copy as it is, where they must pass. A fault is caught when pytest reports failures; a text that is no longer where it
was is an error, not a miss. Exits with 1 unless every fault was caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHOUT_CACHES = shutil.ignore_patterns("__pycache__")


@dataclass(frozen=True)
class Fault:
    """One line of the package changed; ``old`` occurs exactly ``count`` times in ``file``, and all of them are
    changed.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    count: int = 1


FAULTS = (
    Fault(
        "gtpo-negatives",
        "GTPO weighs wrong tokens with the sign of correct ones",
        "algorithms/gtpo.py",
        "-config.alpha1 - config.alpha2 * W",
        "-config.alpha1 + config.alpha2 * W",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "grpo_s-weight",
        "GRPO-S without the entropy term for correct responses",
        "algorithms/grpo_s.py",
        "= config.beta1 + config.beta2 * W",
        "= config.beta1 + 0.0 * W",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "normalisation",
        "the biased standard deviation in place of the unbiased one",
        "algorithms/normalization.py",
        "self.m2 / (self.count - 1)",
        "self.m2 / self.count",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "gtpo-values",
        "GTPO compares wrong tokens by H in place of 1/H",
        "algorithms/gtpo.py",
        "H if correct else 1 / H",
        "H",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "gtpo-axis",
        "GTPO compares along the response in place of the position",
        "algorithms/gtpo.py",
        '"position": (0,)',
        '"position": (1,)',
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "gtpo-geometric",
        "the geometric mean of GTPO without its exponential",
        "algorithms/gtpo.py",
        'V / (mean if config.mean == "arithmetic" else mean.exp())',
        "V / mean",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "gtpo-clip",
        "the lower bound of early eq. 13 is 0 in place of 1",
        "algorithms/gtpo.py",
        "R.clamp(1.0,",
        "R.clamp(0.0,",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "gtpo-penalty",
        "GTPO's penalty of length is not added",
        "algorithms/gtpo.py",
        "R = R + penalty",
        "R = R + 0 * penalty",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "grpo_s-mean",
        "the mean entropy of a response is over its group's longest",
        "algorithms/base.py",
        "mask.sum(1, keepdim=True).clamp(min=1)",
        "mask.shape[1]",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "grpo_s-negatives",
        "GRPO-S, early section 4.6, rewards wrong responses",
        "algorithms/grpo_s.py",
        "return -W",
        "return W",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "entropy-floor",
        "the floor of the entropies is always 1e-6",
        "algorithms/shaping.py",
        "H.clamp(min=self.config.entropy_floor)",
        "H.clamp(min=1e-6)",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "degenerate",
        "groups without a wrong response are shaped",
        "algorithms/shaping.py",
        "0 < group.n < len(group.rows)",
        "0 < group.n",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "guide-weight",
        "what is a guide's weighs nothing in place of 1",
        "algorithms/shaping.py",
        "(sums, counts), config), 1.0)",
        "(sums, counts), config), 0.0)",
        ("tests/algorithms/test_guided_advantages.py",),
    ),
    Fault(
        "batch-statistics",
        "norm_scope=batch normalises by the group",
        "algorithms/shaping.py",
        "rewards_of_group if rewards_of_batch is None else rewards_of_batch",
        "rewards_of_group",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "zeros",
        "early eqs. 4, 16 and 17 without the zeros of the wrong tokens",
        "algorithms/normalization.py",
        "plus.join(Moments(minus.count))",
        "plus",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "round-off",
        "rewards that differ by round-off only have advantages",
        "algorithms/normalization.py",
        "ROUND_OFF = 16",
        "ROUND_OFF = 0",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "clip-higher",
        "the upper clip range is the lower one, in all losses",
        "algorithms/losses.py",
        "ratio.clamp(1 - low, 1 + high)",
        "ratio.clamp(1 - low, 1 + low)",
        ("tests/algorithms/test_losses.py",),
    ),
    Fault(
        "eapo-blame",
        "EAPO gives wrong tokens of high entropy less blame instead of more",
        "algorithms/entropy_shaping.py",
        "config.alpha * A0.sign() * Z",
        "config.alpha * Z",
        ("tests/algorithms/test_family.py",),
    ),
    Fault(
        "forking-quantile",
        "the tokens of lowest entropy in place of the highest",
        "algorithms/forking.py",
        "quantile(score[rows][among], 1 - config.ratio)",
        "quantile(score[rows][among], config.ratio)",
        ("tests/algorithms/test_family.py",),
    ),
    Fault(
        "aggregation",
        "the policy losses average over the micro-batch in place of the global batch",
        "integrations/losses.py",
        "**config.global_batch_info",
        "",
        ("tests/integrations/test_losses.py",),
    ),
    Fault(
        "penalty",
        "the soft overlong punishment begins at the limit in place of a cache length below it",
        "algorithms/penalties.py",
        "max_length - cache_length",
        "max_length",
        ("tests/algorithms/test_against_loops.py",),
    ),
    Fault(
        "codec",
        "the entropy loses its lowest bit on the way out of vLLM",
        "integrations/vllm/codec.py",
        ".to(torch.int64) & _LOW",
        ".to(torch.int64) & (_LOW - 1)",
        ("tests/integrations/vllm/test_codec.py",),
    ),
    Fault(
        "alignment",
        "tokens of a tool get an entropy",
        "integrations/vllm/agent_loop.py",
        "np.where(outside, np.float32(0), columns",
        "np.where(outside, np.float32(1), columns",
        ("tests/integrations/vllm/test_agent_loop.py",),
    ),
    Fault(
        "sampling",
        "groups carried over expire one step late",
        "integrations/sampling.py",
        "global_steps - step > self._max_age",
        "global_steps - step > self._max_age + 1",
        ("tests/integrations/queued/test_sampling.py",),
    ),
    Fault(
        "resume",
        "a restart forgets the groups that waited",
        "integrations/step/checkpoints.py",
        "if rows:\n        tq.kv_batch_put",
        "if not rows:\n        tq.kv_batch_put",
        ("tests/integrations/queued/test_sampling.py",),
    ),
    Fault(
        "tool-tokens",
        "lengths count the tokens of the policy alone",
        "integrations/step/credit.py",
        "lengths=step.of_batch(torch.tensor(step.lengths))",
        "lengths=None",
        ("tests/integrations/queued/test_step.py",),
    ),
    Fault(
        "rejection",
        "a response that verl rejects leaves the statistics of its group",
        "integrations/estimators.py",
        "batch = replace(batch, length_penalty=length_penalty(",
        "batch = replace(batch, response_mask=response_mask, length_penalty=length_penalty(",
        ("tests/integrations/queued/test_step.py",),
    ),
    Fault(
        "sessions",
        "of a session with several outputs the first counts",
        "integrations/transfer_queue.py",
        "(row.output, number)",
        "(-row.output, number)",
        ("tests/integrations/queued/test_step.py",),
    ),
    Fault(
        "critic",
        "a critic is trained on the returns of a skipped batch",
        "integrations/trainer.py",
        "return batch if self._skips_update else super()._update_critic(batch, metrics)",
        "return super()._update_critic(batch, metrics)",
        ("tests/integrations/queued/test_trainer.py",),
    ),
    Fault(
        "counts",
        "counts of several updates are averaged",
        "integrations/credit_trainer.py",
        "        metrics.update(self._sums)\n",
        "",
        ("tests/integrations/queued/test_trainer.py",),
    ),
    Fault(
        "verdict",
        "a response whose `acc` is the threshold is wrong",
        "runs/correctness.py",
        "acc >= threshold",
        "acc > threshold",
        ("tests/runs/test_correctness.py",),
    ),
    Fault(
        "bucket",
        "the bucket of a weight sync does not follow the model",
        "integrations/weights.py",
        "max(LEAST_BUCKET, needed[1])",
        "LEAST_BUCKET",
        ("tests/rules/test_model.py",),
    ),
    Fault(
        "rules",
        "of several problems of a configuration the first alone is named",
        "problems.py",
        "raise ProblemsError(*errors)",
        "raise UserError(errors[0])",
        ("tests/rules/test_sizes.py",),
    ),
    Fault(
        "ranges",
        "null passes where a number is needed",
        "rules/ranges.py",
        "value is None and kind.null",
        "value is None",
        ("tests/rules/test_rules.py::test_a_value_of_another_kind_is_one_line",),
    ),
    Fault(
        "statistics",
        "the standard error of a mean without its correction for few clusters",
        "runs/statistics.py",
        "len(sums) / (len(sums) - 1) * ",
        "",
        ("tests/runs/test_statistics.py",),
    ),
    Fault(
        "holm",
        "Holm's procedure multiplies every p by the number of comparisons left after it, one too few",
        "evaluation/paired.py",
        "np.arange(len(p), 0, -1)",
        "np.arange(len(p) - 1, -1, -1)",
        ("tests/evaluation/test_paired.py",),
    ),
    Fault(
        "pairs",
        "an arm's seeds are compared with the baseline's seeds by their order",
        "report/seeds.py",
        "{one.seed: (one, partners[one.seed]) for one in ours if one.seed in partners}",
        "{one.seed: (one, other) for one, other in zip(ours, partners.values())}",
        ("tests/report/test_seeds.py",),
    ),
    Fault(
        "typo",
        "a key that the configuration lacks is left to Hydra, whose message names no right one",
        "config.py",
        "if key not in defaults and key not in added",
        "if key in ()",
        ("tests/test_config.py",),
    ),
    Fault(
        "control",
        "the control of an embedded task scores validation rows at random, too",
        "tasks/control.py",
        'if extra_info["split"] != "train":',
        'if extra_info["split"] == "":',
        ("tests/tasks/test_task_reward.py",),
    ),
    Fault(
        "comparable",
        "settings that differ between runs are not looked at",
        "report/design.py",
        "return values if len(different) > len({alike[training] for training in values}) else {}",
        "return {}",
        ("tests/report/test_design.py",),
    ),
    Fault(
        "killed",
        "a training whose process is dead is what its record says: running",
        "runs/state.py",
        'if status == "running":',
        'if status == "killed":',
        ("tests/runs/test_state.py",),
    ),
    Fault(
        "sweep",
        "a sweep that is started again with other seeds forgets the runs that it has",
        "runs/sweep.py",
        "runs = {**found.runs, **runs}",
        "runs = {**runs}",
        ("tests/runs/test_sweep.py",),
    ),
)


class Copy:
    """The package as a wheel lays it out, and the tests, in a directory of their own."""

    def __init__(self, directory: Path, tests: Path) -> None:
        self.directory = directory
        self.package = directory / "gtpo_verl"
        shutil.copytree(ROOT / "gtpo_verl", self.package, ignore=WITHOUT_CACHES)
        shutil.copytree(ROOT / "configs", self.package / "configs", ignore=WITHOUT_CACHES)
        shutil.copytree(
            ROOT / "benchmarks", directory / "benchmarks", ignore=WITHOUT_CACHES
        )  # tests use one of its modules
        shutil.copytree(tests, directory / "tests", ignore=WITHOUT_CACHES)
        shutil.copytree(ROOT / "docs", directory / "docs")  # tests compare what they say with the code
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, directory)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command whose Python imports the copy. No bytecode: a changed file may have the size and the second of the
        one before.
        """
        environment = os.environ | {"PYTHONPATH": str(self.directory), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *command], cwd=self.directory, env=environment, capture_output=True, text=True, check=False
        )

    def check_import(self) -> None:
        """Make sure that the copy is tested and not the checkout."""
        done = self.run("-c", "import gtpo_verl; print(gtpo_verl.__file__)")
        if Path(done.stdout.strip()) != self.package / "__init__.py":
            sys.exit(f"error: the copy is not what Python imports: {done.stdout}{done.stderr}")

    def pytest(self, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests)


def caught(fault: Fault, copy: Copy) -> bool:
    """Whether the tests of this fault fail on a copy with it; the copy is put back."""
    file = copy.package / fault.file
    source = file.read_text()
    if source.count(fault.old) != fault.count:
        sys.exit(
            f"error: {fault.name}: {fault.old!r} occurs {source.count(fault.old)} times in gtpo_verl/{fault.file}, not "
            f"{fault.count}: adapt tests/seeded_faults.py to the new code"
        )
    file.write_text(source.replace(fault.old, fault.new))
    try:
        done = copy.pytest(fault.tests)
    finally:
        file.write_text(source)
    if done.returncode not in (0, 1):
        sys.exit(
            f"error: {fault.name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    print(f"{fault.name}: {fault.what}: {'caught by ' + failed[0] if failed else 'NOT CAUGHT'}", flush=True)
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to seed (default: all)")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="other tests than those of this checkout")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if fault.name in (arguments.names or [each.name for each in FAULTS])]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as directory:
        copy = Copy(Path(directory), arguments.tests)
        copy.check_import()
        clean = copy.pytest(tuple(dict.fromkeys(test for fault in faults for test in fault.tests)))
        if clean.returncode != 0:
            sys.exit(f"error: these tests fail without a fault:\n{clean.stdout[-5000:]}{clean.stderr[-3000:]}")
        missed = [fault.name for fault in faults if not caught(fault, copy)]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught, {time.monotonic() - started:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
