"""A training step of SmolLM2-135M on a CPU beside TRL's GRPOTrainer: same model, prompts, sizes and threads, in turn.

    python benchmarks/bench_trl.py [--rounds 2] [--steps 3]

TRL 1.16.0 is installed into .venv-trl, which sees the packages of this environment. Both do 16 prompts x 8 responses of
at most 48 tokens at temperature 1, one update in float32 without a reference model, and no dynamic sampling. The first
step of a process is left out. The load of the machine is printed: on a busy one the ratio says little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from gtpo_verl.runs.directory import METRICS_FILE
from gtpo_verl.runs.reader import read_metrics

TRL = "1.16.0"
PHASES = ("gen", "adv", "update_actor", "update_weights")
SUMS = "reasoning-gym:chain_sum,min_terms=2,max_terms=2,max_digits=1"
PROMPTS, RESPONSES, TOKENS = 16, 8, 48

TRLS = """
import json, sys, time
import pyarrow.parquet as pq
from datasets import Dataset
from reasoning_gym import factory
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, data, steps, out, prompts, responses, tokens = sys.argv[1:]
rows = pq.read_table(data).to_pylist()
data = Dataset.from_list([{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows])

def last_number(completions, truth, **_):
    from gtpo_verl.verifiers.reasoning_gym import read_answer
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if read_answer(text, "number") == true else -1.0 for text, true in zip(texts, truth, strict=True)]

class Clock(TrainerCallback):
    def __init__(self): self.seconds = []
    def on_step_begin(self, *_, **__): self.began = time.perf_counter()
    def on_step_end(self, *_, **__): self.seconds.append(time.perf_counter() - self.began)

size = int(prompts) * int(responses)
clock = Clock()
GRPOTrainer(
    model=model, reward_funcs=last_number, train_dataset=data, callbacks=[clock],
    args=GRPOConfig(
        output_dir=out + ".trl", max_steps=int(steps), per_device_train_batch_size=size // 8,
        gradient_accumulation_steps=8, num_generations=int(responses), max_completion_length=int(tokens),
        temperature=1.0, beta=0.0, learning_rate=1e-5, loss_type="dapo", epsilon_high=0.28, use_cpu=True, bf16=False,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"}, report_to=[], save_strategy="no",
    ),
).train()
open(out, "w").write(json.dumps(clock.seconds))
"""


def trl_python() -> Path:
    """The interpreter of TRL's environment, made at the first call."""
    home = Path(".venv-trl")
    python = home / "bin" / "python"
    if not python.is_file():
        venv.create(home, with_pip=True)
        purelib = next((home / "lib").glob("python3*/site-packages"))
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        (purelib / "stack.pth").write_text(f"{ours}\n{Path(__file__).resolve().parents[1]}\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", f"trl=={TRL}"], check=True)
    return python


def ours(arguments: argparse.Namespace, directory: Path) -> list[float]:
    """Seconds of each step of a training by this package."""
    overrides = [
        *("setting=smollm2", "hardware=cpu", "algo=dapo", "verifier=reasoning_gym", f"trainer.run_dir={directory}"),
        *(f"data.train_files={arguments.data}", f"data.val_files={arguments.data}"),
        *(f"actor_rollout_ref.model.path={arguments.model}", f"trainer.total_training_steps={arguments.steps}"),
        "algorithm.filter_groups.enable=false",
        *("algorithm.entropy.check_every=0", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    ]
    subprocess.run([sys.executable, "-m", "gtpo_verl.train", *overrides], check=True, stdout=subprocess.DEVNULL)
    read, _ = read_metrics(directory / METRICS_FILE)
    steps = [metrics for metrics in read.values() if "timing_s/step" in metrics]
    medians = {name: statistics.median(metrics[f"timing_s/{name}"] for metrics in steps[1:]) for name in PHASES}
    print("gtpo_verl, by phase: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in medians.items()))
    return [metrics["timing_s/step"] for metrics in steps]


def theirs(arguments: argparse.Namespace, directory: Path) -> list[float]:
    """Seconds of each step of a training by TRL."""
    script, out = directory / "trl_steps.py", directory / "trl.json"
    script.write_text(TRLS)
    threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "VERL_PLATFORM": "cpu"}
    sizes = [arguments.steps, out, PROMPTS, RESPONSES, TOKENS]
    command = [trl_python(), script, arguments.model, arguments.data, *map(str, sizes)]
    subprocess.run(command, check=True, env=os.environ | threads)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.rounds < 1:
        parser.error("at least one round of two steps, as the first step of a process is left out")
    arguments.model, arguments.data = Path("outputs/smollm2"), Path("data/smollm2-sums/train.parquet")
    for name, output in (("smollm2", arguments.model), (SUMS, arguments.data.parent)):
        prepare = [sys.executable, "-m", "gtpo_verl.cli", "prepare-data", name, "--output", str(output)]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    seconds: dict[str, list[float]] = {"gtpo_verl": [], "TRL": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            place = Path(directory) / str(number)
            place.mkdir()
            for name, train in (("gtpo_verl", ours), ("TRL", theirs)):
                found = train(arguments, place / "run" if name == "gtpo_verl" else place)[1:]
                seconds[name] += found
                print(f"round {number + 1}, {name}: {', '.join(f'{one:.1f} s' for one in found)}", flush=True)
                print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(", ".join(f"{name} {median:.1f} s a step" for name, median in medians.items()))
    print(f"ratio {medians['gtpo_verl'] / medians['TRL']:.2f}")


if __name__ == "__main__":
    main()
