# `make` alone says what there is.
PYTHON ?= python3
V := .venv
BIN := $(V)/bin
# Where this is set, every gpuctl and ansible-playbook that a test starts compiles all of itself again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help latex demo test check lint types contracts unit e2e lab lab-down lab-test golden perf soak build clean

help:            ## what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## ?/  make \1\t/' | expand -t 22

$(V)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gpuctl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(V)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The demo needs less than development does: its own stamp in the same environment.
$(V)/ready-local: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gpuctl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "making .venv with gpuctl and llama.cpp (a minute or two, the first time only)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(V)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[local]'
	@touch $@

demo: $(V)/ready-local ## a real engine, a tiny model, two configurations measured: under three minutes
	@$(BIN)/gpuctl bench demo
	@echo
	@echo "next:"
	@echo "  $(BIN)/gpuctl bench demo          says SKIP: nothing has changed"
	@echo "  $(BIN)/gpuctl report              the results again; --format markdown for a file"
	@echo "  $(BIN)/gpuctl render tp4-ddtree-b15 -i kpro6   a server of the example campaign"
	@echo "  cp -r inventory/local inventory/mine, edit servers.yml, $(BIN)/gpuctl bench demo -i inventory/mine"

check: lint types contracts unit ## quick: lint, types, import contracts, unit and property tests

lint: $(V)/ready
	$(BIN)/ruff check gpuctl playbooks tests
	$(BIN)/ruff format --check gpuctl playbooks tests
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/ansible-lint --offline --nocolor -q --profile production playbooks/*.yml

types: $(V)/ready
	$(BIN)/mypy

contracts: $(V)/ready
	$(BIN)/lint-imports

unit: $(V)/ready
	$(BIN)/pytest -q --ignore=tests/e2e --ignore=tests/perf --ignore=tests/gpu -m 'not lab'

e2e: $(V)/ready  ## end to end, on this machine
	$(BIN)/pytest -q tests/e2e

lab: $(V)/ready  ## two nodes and their guests on this machine, to break and heal (root, Debian); GPUCTL_LAB=NAME
	@$(BIN)/python -m tests.lab up

lab-down: $(V)/ready ## take them away
	@$(BIN)/python -m tests.lab down

# Two labs side by side: each mostly waits for its machines. With GPUCTL_LAB it is the one of that name.
lab-test: $(V)/ready ## what only the lab can show
	$(BIN)/pytest -q -m lab tests $(if $(GPUCTL_LAB),,-n 2 --dist loadfile)

# The PDF report is tested where there is LaTeX. On Debian it is installed for that, when we may.
latex: ## the LaTeX that `gpuctl report --format pdf` needs (Debian and Ubuntu, as root)
	@if command -v pdflatex >/dev/null && command -v pdftotext >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing LaTeX (latexmk lmodern texlive-latex-recommended texlive-pictures poppler-utils), once"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    latexmk lmodern texlive-latex-recommended texlive-pictures poppler-utils >/dev/null; \
	else echo "no LaTeX here and no right to install it: the tests of the PDF report are skipped"; fi

# The lab waits for machines to boot, the end-to-end tests for engines to answer: both run beside the rest.
# On two cores that takes eleven minutes, twenty where they have other work.
test: latex $(V)/ready ## everything
	$(MAKE) --no-print-directory -j3 check e2e lab-test

perf: $(V)/ready ## how true the load generator is, beside aiohttp and http.client; writes docs/performance.md, docs/overhead.md, docs/staging.md, docs/deploying.md (as root), docs/doctor.md, docs/diagnose.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[perf]'
	$(BIN)/python tests/perf/accuracy.py --write
	$(BIN)/python tests/perf/overhead.py --write
	$(BIN)/python tests/perf/staging.py --write
	PYTHONPATH=. $(BIN)/python tests/perf/deploy.py --write
	$(BIN)/python tests/perf/doctor.py --write
	$(BIN)/python tests/perf/diagnose.py --write
	-$(BIN)/python tests/perf/reports.py

RUNS ?= 50
soak: $(V)/ready ## RUNS=50 campaigns in the lab with faults at random moments (SEED=N replays); docs/reliability.md
	$(BIN)/python -m tests.soak --runs $(RUNS) $(if $(SEED),--seed $(SEED))

golden: $(V)/ready ## rewrite the golden files after a wanted change of output
	$(BIN)/pytest -q --update-golden --ignore=tests/e2e --ignore=tests/perf --ignore=tests/gpu -m 'not lab'

build: $(V)/ready ## wheel and sdist
	$(BIN)/python -m pip install --quiet build && $(BIN)/python -m build

clean:
	rm -rf $(V) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
