"""Countdown as an embedded task: few tokens decide, many are routine."""

from gtpo_verl.tasks import EmbeddedTask, WarmStart
from gtpo_verl.tasks.countdown import demonstrations
from gtpo_verl.tasks.countdown.reward import compute_score

TASK = EmbeddedTask(
    name="countdown",
    description="count down to 0 with given numbers, and a tiny Qwen2 warm-started on unsure but legal play",
    kind="countdown problems",
    cluster_name="problem",
    problems=demonstrations.PROBLEMS,
    train_prompts=1000,
    val_prompts=372,
    warm_start_on_training=True,  # there are few problems, and verdicts are what the demonstrations lack
    prompt=demonstrations.prompt,
    ground_truth=str,
    cluster=str,
    demonstration=demonstrations.demonstration,
    compute_score=compute_score,
    max_response_length=demonstrations.MAX_RESPONSE_LENGTH,
    warm_start=WarmStart(steps=1500, batch_size=32),
    baseline_range=(0.2, 0.6),
)
