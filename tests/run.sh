#!/usr/bin/env bash
# Style, then the tests. Arguments go to pytest: `bash tests/run.sh --slow`, `bash tests/run.sh tests/loss`.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
ruff check .
ruff format --check .
exec python -m pytest "$@"
