#!/usr/bin/env bash
# Lint, types and tests, in an environment that it makes itself. Arguments go to pytest: scripts/test.sh -m
# slow, scripts/test.sh -k groups.
# --torch VERSION, or --torch newest, comes first: tests alone, with that torch, in an environment of its own.
# Where nothing follows, those that depend on torch's insides, in about half of the time of all.
# One invariant: the exit status is 0 only if all of them passed; the last line of a good run is pytest's
# summary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

torch=
insides=(
    tests/unit/{checkpoint,saved,pipelining,groups,modules,weights,optim}
    tests/integration/test_{schedules,compile,compile_around,apply_compile,installed}.py
)
if [ "${1:-}" = --torch ]; then
    torch=${2:?--torch needs a version, such as 2.15.0, or newest}
    shift 2
    if [ $# -eq 0 ]; then set -- "${insides[@]}"; fi
fi
prepare_python "$torch"

failed=()
check() { # name, module, arguments of the module
    local name=$1 module=$2
    shift 2
    if [ -n "${OFFLOAD_PYTHON:-}" ] && ! "$python" -c "import $module" 2>/dev/null; then
        say "$name: skipped, $OFFLOAD_PYTHON has no $module"
        return
    fi
    say "$name: $module $*"
    "$python" -m "$module" "$@" || failed+=("$name")
}

# Compiled meanwhile: else every worker compiles each test, and every interpreter that a test starts the
# package. A variable that forbids it, as images of containers set, holds for the tests themselves.
env -u PYTHONDONTWRITEBYTECODE "$python" -m pytest --collect-only -qq -p no:cacheprovider >/dev/null 2>&1 &
compiling=$!
if [ -z "$torch" ]; then
    check lint ruff check .
    check types mypy
fi
# Each worker begins with a part of its own, so that tests that share a fixture that starts ranks stay
# together, and takes from the other at the end.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n auto --dist worksteal); fi
# One thread a worker: the workers already fill the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# what the table of requirements calls proved is proved by this run, on a machine without a GPU
if [ $# -eq 0 ] && [ -z "${OFFLOAD_PYTHON:-}" ] && ! has_gpu; then set -- --every-row; fi
wait "$compiling" || true # what it cannot collect, the tests tell
check tests pytest ${workers[@]+"${workers[@]}"} "$@"

if [ ${#failed[@]} -gt 0 ]; then
    say "failed: ${failed[*]}"
    exit 1
fi
