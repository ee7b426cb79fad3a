#!/usr/bin/env bash
# Mixed-policy DAPO, a reconstruction (docs/guides/mixed-policy.md), Qwen2.5-7B, 64 GPUs. Needs a guide: data with traces of one,
# from `gtpo-verl traces`, or algorithm.guide.source=server algorithm.guide.model=DIR. No published figures.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" ray_cluster setting=paper_gtpo_7b algo=dapo_mixed verifier=answer "$@"
