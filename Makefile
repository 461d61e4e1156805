# posttrain. `make` alone lists the targets. All that is needed is make and a Python >= 3.11.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# More than two cores: tests wait for processes and limits a good part of their time.
JOBS   ?= 3
KILLS  ?= 200

VLLM   := .venv-vllm
ENVS   := .venv-envs

export PIP_DISABLE_PIP_VERSION_CHECK := 1

INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo rlhf walkthrough test lint format types unit slow-test cluster-test view-test view-assets view-pictures site pages gpu vllm env-adapters faults chaos mutants constraints clean distclean

help: ## list the targets
	@awk 'BEGIN { FS = ":[^#]*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv and install posttrain with its development tools into it

# The stamp is touched last, so a failed install leaves none and the next call tries again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "posttrain needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one:  make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@rm -f $(STAMP)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	@echo "== install into $(VENV) (the first time downloads torch)"
	@$(INSTALL) --editable '.[dev]'
	@sh scripts/system_packages.sh
	@touch $(STAMP)

demo: setup ## SFT, then GRPO, on a tiny model: about two minutes, into runs/demo
	@rm -rf runs/demo
	$(BIN)/posttrain run recipes/demo.toml

rlhf: setup ## SFT, preferences, reward model, PPO and GRPO: four minutes, into runs/rlhf
	@rm -rf runs/rlhf
	$(BIN)/python examples/rlhf.py

walkthrough: setup ## the sorting walk-through: every advantage and loss, side by side
	$(BIN)/posttrain walkthrough

test: setup ## everything that must hold: lint, types, tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory unit

lint: setup ## ruff: rules and formatting
	@echo "== ruff check"
	@$(BIN)/ruff check
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check

format: setup ## let ruff fix and format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: setup ## mypy, strict on the core
	@echo "== mypy"
	@$(BIN)/mypy

unit: setup ## pytest: tests and docstring examples, but for the slow ones (JOBS=3 processes)
	@echo "== pytest"
	@$(BIN)/python -m pytest --quiet --numprocesses $(JOBS) -m 'not cluster and not slow and not browser'

slow-test: setup ## the tests that take long, alone or by the number of their cases
	@echo "== pytest -m slow"
	@$(BIN)/python -m pytest --quiet --numprocesses $(JOBS) -m 'slow and not cluster and not browser'

# Processes are killed and stopped in these while Ray starts others: a failure is shown, and must not come again.
cluster-test: setup ## what needs Ray or many processes, and minutes: one test after the other
	@echo "== pytest -m cluster"
	@$(BIN)/python -m pytest --quiet -m cluster || { echo "== those that failed, once more alone"; \
	  $(BIN)/python -m pytest --quiet -m cluster --last-failed --last-failed-no-failures none; }

view-test: setup ## the page of `posttrain view`, in Debian's chromium: views, keys, attacks, axe
	@sh scripts/system_packages.sh chromium
	@test -d frontend/node_modules || ! command -v npm > /dev/null || (cd frontend && npm ci --no-audit --no-fund)
	@echo "== pytest -m browser"
	@$(BIN)/python -m pytest --quiet -m browser tests/viewer || { echo "== those that failed, once more alone"; \
	  $(BIN)/python -m pytest --quiet -m browser tests/viewer --last-failed --last-failed-no-failures none; }

# The built page is part of the repository: who installs posttrain needs no npm.
view-assets: ## build the page of `posttrain view` from frontend/ (needs npm)
	cd frontend && npm ci --no-audit --no-fund && npm run build

# Pictures of every page from the run of `make demo`, light and dark, into docs/images.
view-pictures: setup ## take the pictures of the page for README and docs (needs runs/demo)
	@sh scripts/system_packages.sh chromium
	$(BIN)/python scripts/view_pictures.py runs/demo docs/images

# Material, mkdocstrings and a notebook kernel are 200 MB that only this needs.
# (mkdocs --quiet would not count warnings: a strict build that passes with broken links.)
$(VENV)/.docs: $(STAMP)
	@$(INSTALL) --editable '.[dev,docs]'
	@touch $@

site: setup $(VENV)/.docs ## the documentation as a site, into build/site; links, anchors and notebooks are checked
	@echo "== mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "== pytest tests/docs"
	@sh scripts/system_packages.sh chromium
	@$(BIN)/python -m pytest --quiet tests/docs

pages: setup ## write the pages that are made from the source: configuration, algorithms, diagnosis, names of TRL and verl
	$(BIN)/python scripts/site/write_pages.py

gpu: setup ## the tests that need a GPU
	@$(BIN)/python -m pytest --quiet -m gpu

# vLLM wants other versions than posttrain: it has an environment of its own, 2.4 GB.
$(VLLM)/.stamp: constraints-vllm.txt
	@rm -f $@
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "== install vLLM into $(VLLM)"
	@$(VLLM)/bin/python -m pip install --constraint constraints-vllm.txt torch
	@$(VLLM)/bin/python -m pip install --no-deps --requirement constraints-vllm.txt
	@touch $@

vllm: setup $(VLLM)/.stamp ## the tests that need vLLM: its servers on the CPU, GRPO on SmolLM2-135M
	@echo "== pytest -m vllm"
	@POSTTRAIN_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest --quiet -m vllm tests/contract tests/rollout

# Libraries of environments want hundreds of packages: an environment that also sees those of .venv.
$(ENVS)/.stamp: constraints-envs.txt
	@rm -f $@
	@test -x $(ENVS)/bin/python || $(BIN)/python -m venv $(ENVS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(ENVS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@$(ENVS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement constraints-envs.txt
	@$(ENVS)/bin/python -m pip install --quiet --no-deps openenv==0.10.0
	@touch $@

env-adapters: setup $(ENVS)/.stamp ## the tests of environments of others: verifiers, OpenEnv, MCP, Gymnasium
	@echo "== pytest tests/envs/test_adapters_*"
	@$(ENVS)/bin/python -m pytest --quiet tests/envs/test_adapters_*.py

# Torn files, harmed stages, SIGTERM, wrong clocks and killed workers come on top of the kills; a difference ends it
# with an error. The longest cases come first, JOBS=3 at a time.
faults: setup ## kill runs KILLS=200 times and resume them; all must end as if nothing had happened
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	printf '%s\n' default counted ppo ahead grpo seldom adapter | xargs -P $(JOBS) -I CASE \
	  $(BIN)/python tests/faults/resume_harness.py --case CASE --kills $$((($(KILLS) + 6) / 7)) \
	    --mishaps --folder "$$scratch/CASE"

chaos: setup ## kill engines, learners, graders, nodes and drivers KILLS=200 times on a two-node cluster
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	$(BIN)/python tests/faults/chaos.py --kills $(KILLS) --folder "$$scratch/chaos"

mutants: setup ## mutate the algorithms; every mutant should make a test fail
	@$(INSTALL) --editable '.[dev,mutants]'
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py run --max-children $(JOBS)
	@$(BIN)/mutmut export-cicd-stats > /dev/null
	@echo "== survivors ('mutmut show NAME' prints the change)"
	@$(BIN)/mutmut results
	@$(BIN)/python -c "import json; s = json.load(open('mutants/mutmut-cicd-stats.json')); \
	  k = s['killed'] + s['timeout']; print(f'== {k} of {s[\"total\"]} killed: {k / s[\"total\"]:.1%}')"

# Pins what is in .venv now. To upgrade: .venv/bin/pip install --upgrade PACKAGE, make unit, then this.
constraints: setup ## write the versions installed in .venv to constraints.txt
	@$(INSTALL) --editable '.[dev,docs,mutants]'
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable --exclude triton \
	   | sed 's/+[A-Za-z0-9.]*$$//'; } > constraints.new
	@mv constraints.new constraints.txt
	@touch $(STAMP)

clean: ## remove caches and build outputs; keep .venv and runs
	rm -rf build dist mutants src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv, .venv-vllm and .venv-envs
	rm -rf $(VENV) $(VLLM) $(ENVS)
