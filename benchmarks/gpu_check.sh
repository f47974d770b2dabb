#!/usr/bin/env bash
# Everything that needs a GPU, in under eight minutes: the tests marked gpu, the sanitizer on the kernels, the
# benchmark. Wants an environment with the gpu, prefill and dev extras; OUT is where results go. What takes too
# long is interrupted, and tells what it has until then.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.
python=${PYTHON:-python3}
out=${OUT:-build/gpu}
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then
    echo "torch of $python finds no CUDA device here; run this where there is one, or name a PYTHON that has it" >&2
    exit 2
fi
mkdir -p "$out"
status=0
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/gpu.txt"
timeout -s INT -k 5 140 "$python" -m pytest -m gpu tests/gpu -q -rs 2>&1 | tee "$out/tests.txt" || status=1
timeout -s INT -k 5 200 "$python" benchmarks/gpu.py --json >"$out/gpu.json" 2>"$out/gpu.err" || status=1
cat "$out/gpu.json" "$out/gpu.err"
if command -v compute-sanitizer >/dev/null; then
    # Of memory alone: torch tries calls of the driver that may fail, and each would be told as an error.
    timeout -k 5 100 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        "$python" -m pytest -m gpu tests/gpu/test_gpu_copies.py -q -k "kernels and apart" 2>&1 |
        tee "$out/sanitizer.txt" || status=1
else
    echo "compute-sanitizer is not installed: not run" | tee "$out/sanitizer.txt"
fi
exit "$status"
