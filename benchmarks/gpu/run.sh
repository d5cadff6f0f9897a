#!/usr/bin/env bash
# Reports on a new GPU in 8 minutes: what works, how fast, and whether memory is as planned.
#     bash benchmarks/gpu/run.sh                       # one GPU
#     bash benchmarks/gpu/run.sh --device cpu --toy    # the same program, in small, on any machine
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/environment.sh
# As in the launchers: buffers of many sizes follow each other, and fixed segments fragment.
# What FlashAttention-4 compiles in one part serves the next.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True,pinned_max_round_threshold_mb:1}"
exec python -m benchmarks.gpu.gpu_report "$@"
