# Everything here works in .venv, which is made when needed; pip runs again only when the requirements changed.
# PYTHON chooses the interpreter (make test PYTHON=python3.12), ARGS are handed on (make test ARGS="-k cases -x").

PYTHON ?= python3
ARGS ?=
WORKERS ?= 4
SANITIZER ?= compute-sanitizer
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
VENV := .venv
BIN := $(VENV)/bin
LATEST := build/latest
NEWEST := torch|triton|numpy|pandas|pydantic|ray|scipy|transformers|typer|wandb|liger.kernel
CONSUMERS := kernels pytest-benchmark py-cpuinfo flashinfer-bench docstring-parser torchtitan spmd-types tyro
PYTEST := pytest -n 4 --dist worksteal
REQUIREMENTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help bench test test-latest test-network test-consumers test-gpu test-versions sanitize lint results hiding readme figures pictures gates docs hub release lint-ruff lint-format lint-types lint-imports clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

bench: $(VENV)/.installed-bench ## Time SwiGLU here: llama7b on a GPU, the smoke shape on a CPU
	$(BIN)/swiglu-bench forward $(ARGS)

test: $(VENV)/.installed-test ## Run the tests, in 4 processes, which often wait for others; those that need a GPU say so
	$(BIN)/$(PYTEST) $(ARGS)

test-latest: ## Run the tests with the newest release of every package; results/versions has the outcome
	@$(PYTHON) -m venv $(LATEST)
	@echo "Installing swiglu-bench[test] without constraints into $(LATEST) (the newest PyTorch takes minutes)"
	@$(LATEST)/bin/python -m pip install --quiet --quiet --upgrade pip
	@$(LATEST)/bin/pip install --quiet --quiet --upgrade --upgrade-strategy eager -e ".[test]"
	@mkdir -p results/versions
	@log=results/versions/latest.txt; \
	{ echo "$$ make test-latest"; $(LATEST)/bin/python --version; \
		$(LATEST)/bin/pip list --format freeze | grep -E "^($(NEWEST))=="; echo "$$ $(strip $(PYTEST) $(ARGS))"; } >$$log; \
	cat $$log; \
	{ $(LATEST)/bin/$(PYTEST) $(ARGS); echo $$? >$(LATEST)/status; } | tee $(LATEST)/log; \
	sed -nE 's/^((FAILED|ERROR) [^ ]+).*/\1/p; s/^=+ ([0-9].* in .*) =+$$/\1/p' $(LATEST)/log >>$$log; \
	exit $$(cat $(LATEST)/status)

test-network: $(VENV)/.installed-test ## Run the tests that fetch packages; results/versions has the outcome
	@log=results/versions/network.txt; echo "$$ make test-network" >$$log; \
	$(BIN)/pytest -m network -v --no-header $(ARGS) tests/worker/test_environments.py >>$$log; status=$$?; \
	cat $$log; exit $$status

# Without their dependencies, most of which these tests never import; what is skipped is a failure here.
test-consumers: $(VENV)/.installed-test ## Run the tests that need the programs we write for; results/versions has the outcome
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/consumers --upgrade $(CONSUMERS)
	@log=results/versions/consumers.txt; \
	{ echo "$$ make test-consumers"; $(BIN)/pip list --path build/consumers --format freeze; } >$$log; \
	PYTHONPATH=$(abspath build/consumers) $(BIN)/pytest -m "not gpu" -v --no-header --disable-warnings $(ARGS) \
		tests/kernels/test_hub.py tests/kernels/test_examples.py tests/show/test_exports.py >>$$log; status=$$?; \
	cat $$log; ! grep -q " SKIPPED" $$log || exit 1; exit $$status

test-gpu: $(VENV)/.installed-test ## Run the kernels' tests and those that need a GPU, on one: in WORKERS (4) processes, then alone
	$(BIN)/python -c "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__, \
		torch.cuda.get_device_name())"
	$(BIN)/pytest tests/kernels -m "not alone" -n $(WORKERS) --dist worksteal $(ARGS)
	$(BIN)/pytest -m "gpu and not alone" --ignore tests/kernels -n $(WORKERS) $(ARGS)
	$(BIN)/pytest -m "gpu and alone" $(ARGS)

test-versions: $(VENV)/.installed-test ## Compile every kernel by each Triton of TRITONS; results/versions has the output
	@mkdir -p results/versions
	@set -e; for version in $(TRITONS); do \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/triton-$$version --upgrade \
			triton==$$version; \
		echo "Triton $$version"; log=results/versions/triton-$$version.txt; \
		echo "$$ make test-versions TRITONS=$$version" >$$log; \
		PYTHONPATH=build/triton-$$version TRITON_CACHE_DIR=build/cache-$$version \
			$(BIN)/python -m swiglu_kernels.standalone.compiled --every >>$$log || { cat $$log; exit 1; }; \
		tail -n 1 $$log; \
	done

# Needs the GPU for itself: beside another process, racecheck ends with an illegal memory access in experts by hand.
# Triton 3.9 asks the driver for attributes that a kernel need not have, and memcheck would count each refusal.
sanitize: $(VENV)/.installed-test ## Run every kernel once under each tool of compute-sanitizer (SANITIZER: where it is)
	@mkdir -p build
	@for tool in memcheck racecheck initcheck; do \
		echo "compute-sanitizer --tool $$tool"; \
		only=; [ $$tool != initcheck ] || only=--portable; \
		api=; [ $$tool != memcheck ] || api="--report-api-errors no"; \
		[ $$tool != racecheck ] || api="--print-limit 0"; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool $$api --error-exitcode 3 --target-processes all \
			$(BIN)/python -m swiglu_kernels.standalone.odd_sizes --few $$only > build/$$tool.log 2>&1; \
		status=$$?; \
		cat build/$$tool.log; \
		[ $$status = 0 ] || [ $$tool$$status = racecheck3 ] || exit $$status; \
	done
	$(BIN)/python -m swiglu_kernels.standalone.hazards build/racecheck.log

lint: lint-ruff lint-format lint-types lint-imports docs ## Check style, format, types, imports, documents (-k: all of them)

lint-ruff: $(VENV)/.installed-dev
	$(BIN)/ruff check .

lint-format: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .

lint-types: $(VENV)/.installed-dev
	$(BIN)/mypy

lint-imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports

hub: $(VENV)/.installed-bench ## Write the kernels as a Hugging Face hub kernel: make hub ARGS=FOLDER
	$(BIN)/python kernels/hub.py $(ARGS)

release: $(VENV)/.installed-test ## Build sdist and wheel into dist/, and check both; publishes nothing
	$(BIN)/python -m pip install --quiet --disable-pip-version-check twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	SWIGLU_BENCH_DIST=dist $(BIN)/pytest -q tests/test_packaging.py $(ARGS)

gates: $(VENV)/.installed-test ## Make the table of docs/gates.md again, from the transformers that is installed
	$(BIN)/python docs/model_gates.py $(ARGS)

docs: $(VENV)/.installed-dev ## Build the documentation into build/site; a warning or a dead link is an error
	$(BIN)/mkdocs build

results: $(VENV)/.installed-bench ## Measure again what the documents quote: make results ARGS="FOLDER [PIECE ...]"
	PATH="$(abspath $(BIN)):$$PATH" results/regenerate.sh $(ARGS)

hiding: $(VENV)/.installed-bench ## Measure how much of its time a contender can hide here: make hiding ARGS=TIMES
	$(BIN)/python docs/hiding.py $(ARGS)

readme: $(VENV)/.installed-bench ## Make the tables of the documents again from results/
	$(BIN)/python docs/documents.py tables README.md docs/*.md results/README.md

figures: $(VENV)/.installed-report ## Make the figures of the documents again from results/
	$(BIN)/python docs/documents.py figures README.md docs/*.md

pictures: $(VENV)/.installed-report ## Take pictures of a report in Chromium, on screens and printed, for docs/report.md
	$(BIN)/python docs/report_pictures.py

clean: ## Remove caches and build products
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find swiglu_bench kernels tests -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove .venv as well
	rm -rf $(VENV)

$(VENV)/.installed-bench: EXTRAS :=
$(VENV)/.installed-report: EXTRAS := [report]
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed-%: $(VENV)/.made $(REQUIREMENTS)
	@echo "Installing swiglu-bench$(EXTRAS) into $(VENV) (PyTorch is large: the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e ".$(EXTRAS)"
	@touch $@

# A .venv that works is kept as it is; a broken one (its Python is gone, or it was cut short) is made anew.
$(VENV)/.made:
	@fail() { echo >&2 "Error: $$*"; exit 1; }; \
	newer="install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11"; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		command -v "$(PYTHON)" >/dev/null || fail "there is no '$(PYTHON)'; $$newer"; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
			fail "'$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); $$newer"; \
		"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
			fail "'$(PYTHON)' lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)"; \
		clear=; if [ -e $(VENV)/pyvenv.cfg ]; then clear=--clear; fi; \
		"$(PYTHON)" -m venv $$clear $(VENV); \
	fi
	@touch $@
