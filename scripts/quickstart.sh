#!/usr/bin/env bash
# The main job, in an environment that it makes itself: a small GPT trains on real text while its activations
# travel to host memory and back. As many ranks as there are GPUs, or two on the CPU. Arguments go to
# scripts/train.py, and come last: scripts/quickstart.sh --steps 50.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
prepare_python

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus > 0 ? gpus : 2))
cores=$("$python" -c '
import os
print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    scripts/train.py --preset tiny --steps 20 --check-end 5 "$@"
