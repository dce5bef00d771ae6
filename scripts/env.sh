# The environment that quickstart.sh and test.sh share; sourced, never run.
#
# prepare_python sets $python to an interpreter that can run everything in this repository, and leaves an
# environment that is already right as it is. Its argument is a version of torch, or `newest`, to have it in
# .venv-VERSION; without one it is that of constraints-cpu.txt, on a GPU what pip gives, in .venv.
# Read from the caller's environment:
#   OFFLOAD_PYTHON  an interpreter that has torch: used as it is; no environment is made, nothing is installed
#   PYTHON          the interpreter to make .venv with, instead of the first one here that works; a .venv of
#                   another one is made anew
#
# Expects `cd` to the repository root and `set -euo pipefail`.

say() { printf '%s\n' "$*" >&2; }

# An executable of the right name may still not run (a version manager's placeholder) or may lack venv: only
# running it tells.
works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        works "$PYTHON" && { printf '%s' "$PYTHON"; return; }
        say "PYTHON=$PYTHON is not a Python >= 3.11 with venv and ensurepip; name another one"
        return 1
    fi
    for candidate in python3 python3.12 python3.11 python3.13; do
        works "$candidate" && { printf '%s' "$candidate"; return; }
    done
    say "none of python3, python3.12, python3.11, python3.13 is a Python >= 3.11 with venv and ensurepip;" \
        "install one (Debian and Ubuntu: python3-venv) or set PYTHON=/path/to/python"
    return 1
}

# Which Python it is, without the environment that it is run from.
build_of() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)'; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# The newest release of torch that pip's indexes have for this machine, whatever its constraints say.
newest_torch() {
    local base folder found
    base=$(find_python)
    folder=$(mktemp -d)
    "$base" -m venv "$folder" # whose pip is there, and knows `index`
    found=$("$folder/bin/python" -m pip --disable-pip-version-check index versions torch 2>"$folder/said" |
        sed -n 's/^torch (\([^+)]*\).*/\1/p') || true
    [ -n "$found" ] || say "pip index versions torch names no version: $(tail -n 1 "$folder/said")"
    rm -rf "$folder"
    [ -n "$found" ] && printf '%s' "$found"
}

prepare_python() {
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    local torch=${1:-}
    if [ -n "${OFFLOAD_PYTHON:-}" ]; then
        if [ -n "$torch" ]; then
            say "OFFLOAD_PYTHON=$OFFLOAD_PYTHON is used with the torch that it has; unset it for --torch $torch"
            return 1
        fi
        python="$OFFLOAD_PYTHON"
        "$python" -c 'import torch' || {
            say "OFFLOAD_PYTHON=$python cannot import torch; unset it to have an environment made in .venv"
            return 1
        }
        return
    fi

    local base= kind=cpu other=gpu pin=(-c scripts/constraints-cpu.txt) stamp venv=.venv
    if has_gpu; then kind=gpu other=cpu pin=(); fi
    if [ "$torch" = newest ]; then torch=$(newest_torch); fi
    if [ -n "$torch" ]; then venv=.venv-$torch pin=(); fi
    python="$PWD/$venv/bin/python"
    if [ -n "${PYTHON:-}" ]; then base=$(find_python); fi # an error if it is none, whatever .venv has
    # The other kind's torch satisfies the same requirement, so pip would leave it in place.
    if ! works "$python" || compgen -G "$venv/installed-$other-*" >/dev/null ||
        { [ -n "$base" ] && [ "$(build_of "$base")" != "$(build_of "$python")" ]; }; then
        base=${base:-$(find_python)}
        say "making $venv with $("$base" --version) ($base)"
        "$base" -m venv --clear "$venv"
    fi
    stamp="$venv/installed-$kind-$(cat setup.py scripts/constraints-cpu.txt scripts/env.sh | "$python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')"
    if [ -e "$stamp" ]; then return; fi

    say "installing into $venv ($kind); the first time takes a few minutes"
    local pip=("$python" -m pip --disable-pip-version-check install --quiet)
    local got_torch=true
    if [ -n "$torch" ]; then
        # In place of a constraint of pip's configuration, which may hold torch back; its indexes stay. A path
        # from here: pip takes blanks in it for the end of one.
        echo "torch==$torch" >"$venv/constraints.txt"
        pip=(env "PIP_CONSTRAINT=$venv/constraints.txt" "${pip[@]}")
    else
        torch=$(sed -n 's/^torch==//p' scripts/constraints-cpu.txt)
    fi
    if [ "$kind" = cpu ]; then
        # First and alone: on Linux the default build of torch brings gigabytes of CUDA libraries, the build
        # called +cpu does not. Where pip's indexes have no such build the pinned version is taken as it is;
        # PIP_EXTRA_INDEX_URL may name an index that has one.
        "${pip[@]}" "torch==$torch+cpu" 2>/dev/null || {
            say "pip's indexes have no torch $torch+cpu: the default build brings gigabytes of CUDA libraries"
            "${pip[@]}" "torch==$torch" || got_torch=false
        }
    fi
    if ! $got_torch || ! "${pip[@]}" ${pin[@]+"${pin[@]}"} -e '.[test,plan,docs,plot]'; then
        say "pip could not install into $venv: its lines above say what it did not find. Without a network its" \
            "reason may read as a conflict of dependencies. Name an index that is reached in PIP_INDEX_URL, or" \
            "an interpreter that has torch and the extras in OFFLOAD_PYTHON"
        return 1
    fi
    rm -f "$venv"/installed-*
    touch "$stamp"
}
