#!/usr/bin/env bash
# DAPO, Qwen2.5-32B, fully asynchronous: as dapo_32b_async, with weights sent after every 4 updates instead of 16, and
# responses that may span up to 2 versions of the weights. A step is a quarter as long, and there are four times as many.
# No published result.
exec "$(dirname "${BASH_SOURCE[0]}")/dapo_32b_async.sh" data.train_batch_size=128 \
    trainer.total_training_steps=1600 trainer.test_freq=20 trainer.save_freq=20 \
    trainer.v1.separate_async.parameter_sync_step=4 trainer.v1.sampler.max_off_policy_threshold=2 "$@"
