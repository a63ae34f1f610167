#!/usr/bin/env bash
# On a machine with one GPU: the tests that need it, and how fast values go to it and come from it. Less than 5 minutes.
#
#     bash tests/gpu/run.sh [FOLDER]     FOLDER is for the runs of the benchmark, by default a temporary one
#
# PYTHON names a Python that has torch for the GPU, this package (pip install -e .), pytest, pytest-timeout and hypothesis.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python}

"$python" - <<'END'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit("torch sees no GPU here")
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
END
timeout 150 "$python" -m pytest -q -o addopts="--import-mode=importlib --strict-markers -ra" tests/gpu
timeout 120 "$python" benchmarks/bench_device.py --device cuda ${1:+--folder "$1"}
