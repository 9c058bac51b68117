#!/usr/bin/env bash
# The commands behind docs/accuracy.md, from the repository's root, in an environment that has the package.
# About two hours on two cores. Results go to configs/profiles and bench/results/eval-*.
set -euo pipefail
P=configs/profiles/SmolLM2-135M-Instruct
SMALL="budget_tokens=1024 profile=$P-1024.safetensors scout.recall_interval=8"
DEFAULT="budget_tokens=2048 profile=$P-2048.safetensors"
EVERY8="$DEFAULT scout.recall_interval=8"

sglang-hybrid profile --dtype float32 --prompts 2
sglang-hybrid profile --dtype float32 --prompts 1 --steps 96 --predictor-of "$P-2048.safetensors" --budget 1024

# six places: none of the decoded tokens was among those that the predictor was fitted on
sglang-hybrid eval --dtype float32 --tasks text --windows 6 --decode-tokens 64 --out bench/results/eval-text \
    --run "1024, real query: $SMALL prediction=none" \
    --run "1024, calibrated: $SMALL"

sglang-hybrid eval --dtype float32 --tasks text --windows 6 --decode-tokens 64 --out bench/results/eval-sticky \
    --run "2048, as profiled: $DEFAULT" \
    --run "2048, every 8: $EVERY8" \
    --run "2048, every 8, not sticky: $EVERY8 scout.resident_bonus=0 scout.min_miss_attention=0" \
    --run "2048, every 8, ScoutAttention: budget_tokens=2048 policy=scoutattention scoutattention.recall_interval=8"
