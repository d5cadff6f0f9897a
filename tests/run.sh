#!/usr/bin/env bash
# Style, then the tests. Arguments go to pytest: `bash tests/run.sh --slow`, `bash tests/run.sh tests/loss`.
# Two pytests share the test modules, as many tests wait more than they compute; see conftest.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
ruff check .
ruff format --check .
# With "=": as an argument of its own the folder would count as a test path, and pytest would look for its settings there.
shared="$(mktemp -d)"
python -m pytest --claims="$shared" "$@" > "$shared/second.txt" 2>&1 &
second=$!
trap 'kill "$second" 2> /dev/null || true; rm -rf "$shared"' EXIT
status=0
python -m pytest --claims="$shared" "$@" || status=$?
wait "$second" || status=$?
echo "The other half of the modules:"
cat "$shared/second.txt"
exit "$status"
