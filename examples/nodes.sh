#!/usr/bin/env bash
# Train over several machines by torchrun. Run the same on each of them, here on two:
#
#   examples/nodes.sh node0                                                   # train over all ranks; node0 is one of the two
#   examples/nodes.sh node0 examples/train_own.py --pp 2 --save /shared/run1  # a program of yours
#
# NODES and RANKS are the numbers of machines and of ranks on each. With RESTARTS=20 all ranks start anew, up to 20 times, where
# one fails, and go on from the last checkpoint. It has run with two agents on one machine, without a GPU.
set -euo pipefail
meeting=${1:?the name of the machine at which all meet}
shift
nodes=${NODES:-2} ranks=${RANKS:-8}
[ $# -gt 0 ] || set -- -m overlap1f1b train --pp "$nodes" --ep "$ranks" --checkpoint /shared/run1
export CUDA_DEVICE_MAX_CONNECTIONS=32
exec torchrun --nnodes "$nodes" --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-id "${RUN:-run1}" \
    --rdzv-endpoint "$meeting:${PORT:-29500}" --max-restarts "${RESTARTS:-0}" "$@"
