#!/bin/sh
# Make the virtual environment $1 and install the project into it, with the versions in constraints.txt.
set -eu
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"

$pip install --constraint constraints.txt --upgrade pip setuptools wheel
# torch first and by its exact version: where pip finds a CPU build first, it installs that build, and no later package asks
# for another one with gigabytes of CUDA libraries.
$pip install "$(grep '^torch==' constraints.txt)"
$pip install --no-build-isolation --constraint constraints.txt --editable '.[test]'
# Compile the native backend for this machine's CPU, so that the first start does not wait. Without a compiler torch computes.
"$venv/bin/python" -m llama_core.backends.native
