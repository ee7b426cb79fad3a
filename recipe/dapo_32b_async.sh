#!/usr/bin/env bash
# DAPO, Qwen2.5-32B, about one step off policy: 64 GPUs train, 64 others generate the next step meanwhile; verl drops
# what is 8 steps old (trainer.v1.sampler.max_off_policy_threshold). The warm-up is as long as the paper's, 320 updates,
# which verl counts here, not steps. No published result of this setting; verl reports 2.4 to 2.7 times the speed of the
# synchronous trainer at 7B for its fully asynchronous one.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_dapo_32b algo=dapo verifier=answer \
    trainer.nnodes=8 actor_rollout_ref.rollout.nnodes=8 actor_rollout_ref.rollout.n_gpus_per_node=8 \
    actor_rollout_ref.hybrid_engine=false trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=16 actor_rollout_ref.actor.optim.lr_warmup_steps=320 \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 "$@"
