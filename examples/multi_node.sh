#!/usr/bin/env bash
# Several machines without a scheduler: run the same line on each of them, with its own NODE_RANK.
#
#   NODES=2 NODE_RANK=0 HEAD=10.0.0.1 examples/multi_node.sh --steps 1000     # on 10.0.0.1
#   NODES=2 NODE_RANK=1 HEAD=10.0.0.1 examples/multi_node.sh --steps 1000     # on the other one
#
# First whether it pays:   NODES=2 NODE_RANK=... HEAD=... BENCH=1 examples/multi_node.sh
# DEVICES: processes per machine. ACCELERATOR: cpu or gpu. Options go to text_gpt.py (or to the bench).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${NODES:?number of machines}" "${NODE_RANK:?number of this machine, from 0}" "${HEAD:?address of machine 0}"
DEVICES=${DEVICES:-1}
if [ -n "${BENCH:-}" ]; then
    program=(-m lightning_onebit bench)
else
    program=(examples/text_gpt.py --num-nodes "$NODES" --devices "$DEVICES"
        --accelerator "${ACCELERATOR:-cpu}" --strategy "${STRATEGY:-onebit_adam}")
fi
exec python -m torch.distributed.run \
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$DEVICES" \
    --master-addr "$HEAD" --master-port "${PORT:-29400}" \
    "${program[@]}" "$@"
