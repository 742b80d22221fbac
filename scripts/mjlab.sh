#!/bin/sh
# Install mjlab in a virtual environment of its own (env=mjlab), as it needs another MuJoCo.
# The version of torch is the one of constraints.txt: on a machine without a GPU, the CPU build.
set -eu
python=${PYTHON:-python3}
folder=${1:-.venv-mjlab}
$python -m venv "$folder"
"$folder/bin/pip" install --quiet mjlab==1.6.0 "$(grep '^torch==' constraints.txt)"
"$folder/bin/python" -c 'import mjlab' && echo "$folder has mjlab; embodied train env=mjlab ..."
