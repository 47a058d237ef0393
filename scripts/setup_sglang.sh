#!/bin/sh
# setup_sglang.sh [FOLDER]: a virtual environment with SGLang for CPUs, without CUDA packages, and with kvferry from this
# checkout. FOLDER (default .venv-sglang) is reused if it is complete. PYTHON: the interpreter to build it from.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-sglang}
pip="$venv/bin/python -m pip install --disable-pip-version-check --quiet"
ready=$venv/.kvferry-ready
inputs="$root/scripts/setup_sglang.sh $root/scripts/sglang-deps.txt $root/scripts/sglang-nodeps.txt $root/pyproject.toml"

if [ -e "$ready" ] && [ -z "$(find $inputs -newer "$ready")" ]; then exit 0; fi
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "installing SGLang into $venv (1.7 GB)"
$pip -r "$root/scripts/sglang-deps.txt" pytest pytest-timeout
# what SGLang's package asks for beyond this is for GPUs
$pip --no-deps -r "$root/scripts/sglang-nodeps.txt"
$pip --no-deps --editable "$root"
# packages that SGLang imports but does not use on a CPU
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$root/scripts/sglang-standins" > "$site/kvferry-standins.pth"
touch "$ready"
