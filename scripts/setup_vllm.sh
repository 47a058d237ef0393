#!/bin/sh
# setup_vllm.sh [FOLDER]: a virtual environment with vLLM for CPUs (x86-64 Linux), without CUDA packages, and with kvferry
# from this checkout. FOLDER (default .venv-vllm) is reused if it is complete. PYTHON: the interpreter to build it from.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm}
pip="$venv/bin/python -m pip install --disable-pip-version-check --quiet"
ready=$venv/.kvferry-ready
inputs="$root/scripts/setup_vllm.sh $root/scripts/vllm-deps.txt $root/scripts/vllm-nodeps.txt $root/pyproject.toml"

if [ -e "$ready" ] && [ -z "$(find $inputs -newer "$ready")" ]; then exit 0; fi
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "installing vLLM into $venv (3.7 GB)"
$pip torch==2.13.0
$pip -r "$root/scripts/vllm-deps.txt"
# what these packages ask for beyond that is for GPUs, audio and video
$pip --no-deps -r "$root/scripts/vllm-nodeps.txt"
$pip --no-deps --editable "$root"
touch "$ready"
