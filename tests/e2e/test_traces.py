"""``gtpo-verl traces`` on the embedded task: real Ray, vLLM and verifier; the file is one that a training takes."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.data.traces import check_traces
from gtpo_verl.tasks import task
from gtpo_verl.tasks.prepare import prepare_task

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]
PROMPTS = 40


def test_the_guides_answers_are_kept_with_the_models_log_probabilities(default_task_dir: Path, tmp_path: Path) -> None:
    prepared = prepare_task(task("sums"), default_task_dir)
    source, output = tmp_path / "train.parquet", tmp_path / "with_traces" / "train.traces.parquet"
    pq.write_table(pq.read_table(prepared.train_file).slice(0, PROMPTS), source)
    command = [
        *(sys.executable, "-m", "gtpo_verl.cli", "traces", str(prepared.model_path), str(source)),
        *("setting=quickstart", "hardware=cpu", "--samples", "2", "--output", str(output.parent)),
        "data.val_max_samples=20",  # as in runs of the quickstart: the rows are those of the file all the same
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 responses" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(prepared.model_path)
    prompts, answered = check_traces(str(output), limit=64, with_log_probs=True, tokenizer=tokenizer)
    assert prompts == PROMPTS
    assert 5 < answered < PROMPTS  # about half of the responses of the warm start are correct

    model = AutoModelForCausalLM.from_pretrained(prepared.model_path, dtype=torch.float64)
    rows = pq.read_table(output).to_pylist()
    row = next(row for row in rows if row["guide_responses"])
    tokens, log_probs = row["guide_responses"][0], row["guide_log_probs"][0]
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        exact = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert log_probs == pytest.approx(exact[range(len(tokens)), tokens].tolist(), abs=1e-4)
    assert tokens[-1] == tokenizer.eos_token_id

    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "40 prompts, 40 of them answered before." in again.stdout
    lines = output.with_name(f"{output.name}.sampled.jsonl").read_text().splitlines()
    assert len(lines) == PROMPTS + 1
    assert json.loads(lines[0])["settings"]["--samples"] == 2
