#!/bin/sh
# benchmarks/gpu_trainer.py on a machine with little installed: torch with CUDA, transformers, and what is named below. No network.
# Usage: benchmarks/gpu.sh [--wheels DIR] [arguments of gpu_trainer.py]. PYTHON names the interpreter. Takes under eight minutes.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
PYTHON=${PYTHON:-python3}
wheels=
if [ "${1:-}" = --wheels ]; then
    wheels=${2:?--wheels needs a folder}
    shift 2
fi
missing() {
    "$PYTHON" - <<'EOF'
import importlib.util
names = {"torch": "torch", "transformers": "transformers", "numpy": "numpy", "safetensors": "safetensors", "psutil": "psutil", "pydantic": "pydantic",
         "pydantic_core": "pydantic-core", "annotated_types": "annotated-types", "typing_inspection": "typing-inspection",
         "typing_extensions": "typing-extensions", "packaging": "packaging", "megatron": "megatron-core"}
print(" ".join(wheel for module, wheel in names.items() if importlib.util.find_spec(module) is None))
EOF
}
lacking=$(missing)
if [ -n "$lacking" ] && [ -n "$wheels" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # Without their needs: those are the names above, and torch must stay the machine's own.
    for each in $lacking; do
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --find-links "$wheels" --target "$site" "$each" || true
    done
    PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    lacking=$(missing)
fi
if [ -n "$lacking" ]; then
    echo "gpu.sh: $PYTHON ($("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')) lacks: $lacking" >&2
    echo "Where there is a network: pip download --no-deps --only-binary=:all: --python-version <that> -d DIR $lacking; then: gpu.sh --wheels DIR" >&2
    exit 2
fi
PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 "$PYTHON" -m benchmarks.gpu_trainer "$@"
