# Every target installs its requirements into .venv; `make` alone lists the targets.
#
#   PYTHON       the interpreter for .venv (3.11 or newer)
#   EXTRAS       the extras that `make test` installs
#   PYTEST_ARGS  more arguments for pytest, such as '-k resume'
#   WORKERS      parallel tests; each takes up to 3 GiB
#   WORKDIR      the run folder of `make train`
#   BENCHMARK    the folder of published curves for `make coverage`

SHELL := /bin/bash

# The first Python that is at least 3.$(1) and can make a virtual environment.
find-python = $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 \
    $(HOME)/.pyenv/versions/*/bin/python; do \
  "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $(1)))' 2>/dev/null \
    && echo "$$p" && break; done)

PYTHON ?= $(call find-python,11)
EXTRAS ?= test,reference,dev,docs
WORKDIR ?= runs/digits
PYTEST_ARGS ?=
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help train test test-fast test-long lint types check faults soak smoke test-newest docs site checkpoints gallery preflight test-tpu test-gpu-compile coverage bench-cpu clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) \
	  | awk -F ':.*## ' '{printf "make %-16s %s\n", $$1, $$2}'

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer with venv is needed: install it' \
	  '(Debian: apt-get install python3-venv) or give PYTHON=/path/to/python3' >&2; exit 1; }
	"$(PYTHON)" -m venv .venv

.venv/.core: pyproject.toml constraints.txt vit_jax/data/_native.c | .venv/bin/python
	@echo 'Installing JAX, Flax and 80 other packages (1 GB) into .venv: about a minute, longer on a slow network'
	.venv/bin/python -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/.extras: .venv/.core
	@echo 'Installing the extras $(EXTRAS) into .venv: a few minutes'
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: .venv/.core  ## Train a small ViT on the digits that scikit-learn ships
	@echo 'Training on 1,437 images of digits: about 2 minutes on two CPU cores'
	.venv/bin/python -m vit_jax train --config experiments/vit/digits.py --workdir $(WORKDIR)

# Most programs are compiled without optimization, those of tests marked `parity` with the defaults
# that users get (tests/helpers/xla.py).
test: .venv/.extras  ## Run the whole test suite
	.venv/bin/python $(PYTEST) -m 'not long' $(PYTEST_ARGS)

test-fast: .venv/.extras  ## Run the tests for daily work: no slow tests, no training processes
	TESTS_XLA=quick .venv/bin/python $(PYTEST) -m 'not process and not slow and not long' $(PYTEST_ARGS)

test-long: .venv/.extras  ## Run the tests that `make test` skips: documented commands, expensive variants
	.venv/bin/python $(PYTEST) -m long $(PYTEST_ARGS)

lint: .venv/.extras  ## Style: ruff's rules and format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/.extras  ## Static types: mypy
	.venv/bin/mypy

check: lint types test  ## Run everything that a change must pass

faults: .venv/.extras  ## Cause every fault of tests/faults/README.md; ends with a table of them
	FUZZ=8 .venv/bin/python $(PYTEST) -m fault $(PYTEST_ARGS)

soak: .venv/.extras  ## Train for an hour (SOAK_MINUTES) under random faults; ends with their counts
	.venv/bin/python tests/soak.py

smoke: .venv/.extras  ## Train every experiment at its smallest size, a few steps
	.venv/bin/python $(PYTEST) tests/test_smoke.py $(PYTEST_ARGS)

# No constraints and no reference implementations: the newest release of everything else. Its
# XLA may not support the flags for fast compilation.
test-newest:  ## Run the suite on Python 3.12 or newer with the newest JAX, if there is one
	@set -e; python="$(call find-python,12)"; \
	if [ -z "$$python" ]; then echo 'test-newest: no Python 3.12 or newer here; skipped'; exit 0; fi; \
	if [ ! -e .venv-newest/.done ] || [ pyproject.toml -nt .venv-newest/.done ]; then \
	  "$$python" -m venv .venv-newest; \
	  .venv-newest/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '.[test]'; \
	  touch .venv-newest/.done; \
	fi; \
	.venv-newest/bin/python -c 'import jax, platform; \
	  print("Python", platform.python_version(), "JAX", jax.__version__)'; \
	TESTS_XLA=known .venv-newest/bin/python $(PYTEST) -m 'not long' $(PYTEST_ARGS)

docs: .venv/.core  ## Write docs/config.md, docs/config/, docs/flags.md, docs/models.md, and tables of keys and variants
	.venv/bin/python docs/site/keys.py
	.venv/bin/python -m vit_jax.commands._config_keys
	.venv/bin/python -m vit_jax list commands > docs/flags.md
	.venv/bin/python -m vit_jax.profiling.variants
	.venv/bin/python docs/site/models.py

# With libtpu, JAX itself looks for TPUs at every start and prints errors if there are none.
.venv-tpu/.done: pyproject.toml constraints.txt | .venv/bin/python
	"$(PYTHON)" -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install -q -c constraints.txt -e '.[sweep,preflight,test]'
	@touch $@

.venv-gpu/.done: pyproject.toml constraints.txt | .venv/bin/python
	"$(PYTHON)" -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install -q -c constraints.txt -e '.[preflight-gpu,test]'
	@touch $@

.venv-site/.done: pyproject.toml constraints.txt | .venv/bin/python
	"$(PYTHON)" -m venv .venv-site
	.venv-site/bin/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

site: .venv-site/.done  ## Build the web site from docs/ and the package into site/
	.venv-site/bin/python docs/site/build.py site

checkpoints: .venv/.extras  ## Measure the families of docs/checkpoint_families.md against their original code
	PYTHONPATH=.:tests .venv/bin/python -m helpers.checkpoint_table

gallery: .venv-tpu/.done  ## Redraw docs/gallery.md's pictures with its commands
	JAX_PLATFORMS=cpu .venv-tpu/bin/python docs/gallery/make.py
	.venv-tpu/bin/python docs/gallery/hero.py docs/hero.png

preflight: .venv-tpu/.done  ## Compile the published recipes for TPUs: docs/tpu_recipes.md
	JAX_PLATFORMS=cpu .venv-tpu/bin/python tests/bench/tpu_recipes.py
	JAX_PLATFORMS=cpu .venv-tpu/bin/python tests/bench/tpu_slices.py
	JAX_PLATFORMS=cpu .venv-tpu/bin/python tests/bench/tpu_pixels.py

test-tpu: .venv-tpu/.done  ## Run the commands of docs/tpu.md through the TPU compiler
	JAX_PLATFORMS=cpu .venv-tpu/bin/python -m pytest tests/commands/test_preflight.py $(PYTEST_ARGS)

test-gpu-compile: .venv-gpu/.done  ## Compile the published recipes for 8 H100s, without a GPU
	JAX_PLATFORMS=cpu .venv-gpu/bin/python -m pytest tests/commands/test_preflight.py -k gpus $(PYTEST_ARGS)
	JAX_PLATFORMS=cpu .venv-gpu/bin/python tests/bench/gpu_recipes.py

coverage: .venv/.core  ## Measure bands on synthetic laws and, in $BENCHMARK, published curves: docs/predictions.md
	.venv/bin/python -m vit_jax scaling coverage --form auto --points 12 --curves 250 --bootstrap 1 --seed 271129
	for table in $(BENCHMARK:%=%/benchmark.*.csv); do \
	  .venv/bin/python -m vit_jax scaling fit --csv $$table --x 'Seen Examples' --y Loss --by Domain,Model,Task \
	    --holdout-column Training --bootstrap 1 || exit; \
	done

bench-cpu: .venv/.extras  ## Time ViT-B/16 on this CPU against the PyTorch reference
	.venv/bin/python tests/bench/cpu.py

clean:  ## Remove environments, caches and builds; runs/ stays
	rm -rf .venv .venv-newest .venv-site .venv-tpu .venv-gpu site .cache .mypy_cache .pytest_cache .ruff_cache build *.egg-info
