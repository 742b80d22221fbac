#!/bin/sh
# An environment with the real LeRobot and openpi-client, for the tests in tests/interop.
#   INTEROP   where it is made (default .venv-interop); nothing is done where it is complete
#   PYTHON    the Python of the project's own environment (default .venv/bin/python)
# Its own packages are those of scripts/interop/requirements.txt; all others (PyTorch, MuJoCo, ...)
# are the project's, seen through a .pth file behind them (and those behind the project's own, where
# its environment sees another one). So nothing large is installed twice.
set -eu
cd "$(dirname "$0")/.."
INTEROP=${INTEROP:-.venv-interop}
PYTHON=${PYTHON:-.venv/bin/python}
wanted=scripts/interop/requirements.txt

fail() { echo "interop: $1" >&2; rm -f "$INTEROP/ready"; exit 1; }

"$PYTHON" -c 'import torch, pyarrow' 2>/dev/null ||
    fail "$PYTHON has no embodied-rl; run: make setup (or set PYTHON)"
stamp=$(cat "$wanted" scripts/interop/adapt.py | cksum; "$PYTHON" -c 'import sys; print(sys.prefix, sys.version)')
[ "$(cat "$INTEROP/ready" 2>/dev/null)" = "$stamp" ] && exit 0

rm -rf "$INTEROP"
"$PYTHON" -m venv "$INTEROP" || fail "no virtual environment could be made in $INTEROP"
site=$("$INTEROP/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$site/zz_project.pth"
log="$INTEROP/install.log"
# --no-deps: LeRobot's limits on torch and Python exclude what is installed here (adapt.py says why
# it runs all the same); what it imports is in the list, with the versions that it asks for.
"$INTEROP/bin/python" -m pip install --quiet --no-deps --ignore-requires-python -r "$wanted" \
    >"$log" 2>&1 ||
    fail "the package registry does not give all of $wanted: $(grep ERROR "$log" | tail -1)"
"$INTEROP/bin/python" scripts/interop/adapt.py "$site" || fail "LeRobot could not be adapted"
"$INTEROP/bin/python" -c 'import openpi_client.websocket_client_policy
import lerobot.datasets.lerobot_dataset' >>"$log" 2>&1 ||
    fail "LeRobot does not import: $(tail -1 "$log")"
echo "$stamp" >"$INTEROP/ready"
echo "interop: $INTEROP is ready; run: $INTEROP/bin/python -m pytest tests/interop"
