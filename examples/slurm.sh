#!/usr/bin/env bash
# Train over two nodes with eight GPUs each, submitted from the clone: sbatch examples/slurm.sh [PROGRAM …]
# A job that is submitted again goes on from its last checkpoint. It has not run under Slurm.
#SBATCH --job-name=run1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail
meeting=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NODES=$SLURM_JOB_NUM_NODES RUN=$SLURM_JOB_ID
srun --kill-on-bad-exit=1 examples/nodes.sh "$meeting" "$@" # one task a node: torchrun's agent, which starts the ranks
