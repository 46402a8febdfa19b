# Everything runs in .venv, which `make setup` makes; see `make help`.
.POSIX:
SHELL = /bin/sh
.DEFAULT_GOAL = help
.PHONY: help setup demo demo-slurm test test-slow test-rare cluster-up cluster-down clean

# Python 3.11 or newer; empty = the first such of python3.11, python3, python3.12, python3.13.
PYTHON ?=
# Extra pip arguments for the torch wheel.
TORCH_INDEX ?=
MIN_FREE_GB ?= 5
PYTEST_ARGS ?=
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest --durations=30 $(PYTEST_ARGS)

help:
	@echo 'make setup      make or repair .venv (about 3 GB); does nothing when nothing changed'
	@echo '                  PYTHON=/path/to/python3.11   which Python'
	@echo "                  TORCH_INDEX='--index-url …'  PyTorch's CPU wheel index, where pip would take a CUDA build"
	@echo 'make demo       setup, then a small campaign on this machine'
	@echo 'make demo-slurm setup, then the same campaign on a private Slurm cluster (see cluster-up), with a preemption'
	@echo '                  DEMO_ARGS=--no-preemption    without one; DEMO_ARGS=--help lists the rest'
	@echo "make test       setup, then the fast tests (PYTEST_ARGS='-k name')"
	@echo 'make test-slow  setup, then the tests that start engines, clusters and installs'
	@echo 'make cluster-up    setup, then a private Slurm cluster on this machine, for tests'
	@echo "                  CLUSTER_ARGS='--prefix DIR'  where (else \$$TMPDIR/evo-cluster, or .cluster/ without TMPDIR)"
	@echo 'make cluster-down  stop that cluster and all its jobs'
	@echo '                  CLUSTER_ARGS=--wipe  and remove its folder'
	@echo 'make test-rare  setup, then the slow tests that are near to others'
	@echo 'make clean      remove .venv, builds and caches; campaigns stay'

setup:
	@if [ -z '$(PYTHON)' ] && [ -x .venv/bin/python ] && .venv/bin/python -I -S tools/setup_venv.py --current; then exit 0; fi; \
	new='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if [ -n '$(PYTHON)' ]; then \
	    command -v '$(PYTHON)' >/dev/null 2>&1 || { echo "setup: no Python at '$(PYTHON)'. Give one: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	    '$(PYTHON)' -c "$$new" 2>/dev/null || { echo "setup: '$(PYTHON)' does not run or is older than Python 3.11 ($$('$(PYTHON)' --version 2>&1 | head -n 1)). Give a newer one: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	    python='$(PYTHON)'; \
	else \
	    python=; \
	    for each in python3.11 python3 python3.12 python3.13; do \
	        if "$$each" -c "$$new" 2>/dev/null; then python=$$each; break; fi; \
	    done; \
	    [ -n "$$python" ] || { echo 'setup: Python 3.11 or newer was not found. Install one (Debian: apt-get install python3 python3-venv), or: make setup PYTHON=/path/to/python3.11' >&2; exit 2; }; \
	fi; \
	exec "$$python" tools/setup_venv.py --min-free-gb '$(MIN_FREE_GB)' --torch-index='$(TORCH_INDEX)'

demo: setup
	.venv/bin/evo-hpc demo $(DEMO_ARGS)

demo-slurm: setup
	.venv/bin/python -m tools.demo_slurm $(DEMO_ARGS)

test: setup
	$(PYTEST) -m 'not slow'

test-slow: setup
	$(PYTEST) -m 'slow and not rare' --timeout=900

test-rare: setup
	$(PYTEST) -m 'slow and rare' --timeout=900

cluster-up: setup
	.venv/bin/python -m tests.cluster up $(CLUSTER_ARGS)

cluster-down: setup
	.venv/bin/python -m tests.cluster down $(CLUSTER_ARGS)

clean:
	rm -rf .venv .setup.lock build dist *.egg-info .pytest_cache .hypothesis
	find evo_hpc tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
