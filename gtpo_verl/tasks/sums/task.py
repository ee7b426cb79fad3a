"""The sums as an embedded task."""

from gtpo_verl.tasks import EmbeddedTask, WarmStart
from gtpo_verl.tasks.sums import demonstrations
from gtpo_verl.tasks.sums.reward import compute_score

TASK = EmbeddedTask(
    name="sums",
    description="sums with written-out steps, and a tiny Qwen2 warm-started on noisy demonstrations",
    kind="sums of three or four digits",
    cluster_name="multiset of operands",
    problems=demonstrations.PROBLEMS,
    train_prompts=3584,
    val_prompts=1024,
    prompt=demonstrations.prompt,
    ground_truth=demonstrations.answer,
    cluster=demonstrations.cluster,
    demonstration=demonstrations.demonstration,
    compute_score=compute_score,
    max_response_length=demonstrations.MAX_RESPONSE_LENGTH,
    # The loss reaches the floor set by the demonstrations' noise, so the baseline is the same on every machine; a
    # higher peak rate ends further from that floor (measured: accuracies of 0.29 to 0.47 at 5e-3 and 3e-3). With 400
    # steps the model gives the same baseline, and training at the quickstart's learning rate then forgets more than it
    # learns: 24 steps of DAPO went from 0.47 to 0.35 on problems whose operands the warm start had not seen, and from
    # 0.50 to 0.81 after 800.
    warm_start=WarmStart(steps=800, batch_size=64),
    baseline_range=(0.3, 0.6),
)
