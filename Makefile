# Everything starts from a clone with Python and make: each target sets up .venv first, once.
#   make demo    the main job, shown        make test   everything that must pass
#   make quick   lint and the quick tests   make soak   every case of the sweeps that make test takes samples of
#   make lint    style, types, imports      make bench  side by side with torch
#   make clean   remove what the others made   make docs   the documentation as a site
#   make pages   the pages of holdfast report, in a real browser
#   make frameworks  other packages on holdfast, unmodified (docs/frameworks.md)
#   make matrix  the quick tests on several Pythons and torches (docs/support.md)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: demo test quick soak lint bench matrix docs pages frameworks setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh scripts/install_commands.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup.sh && touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

# Most slow tests have processes of their own that keep all cores busy; those of one core are shared out.
# Tests of soak are slow as well.
test: lint
	@$(BIN)/python -m pytest -n auto --dist loadfile -m "not soak and not browser and (not slow or one_core)"
	@$(BIN)/python -m pytest -m "slow and not one_core and not soak and not browser and not frameworks"

quick: lint
	@$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not browser"

soak: $(STAMP)
	@$(BIN)/python -m pytest -n auto --dist load -m soak --durations=10

# Not part of make test: a browser takes 400 MB.
pages: $(STAMP)
	@sh scripts/install_commands.sh chromium:chromium
	@$(BIN)/python -m pytest -m browser

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

# -W: a link that leads nowhere, or a page that the index does not name, is an error.
docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@$(BIN)/python -m sphinx -b html -n -W --keep-going -q docs site
	@echo 'The documentation is in site/README.html.'

# An environment of its own: the packages want other versions than constraints.txt has. torch is the same.
frameworks:
	@[ -x .frameworks/bin/python ] || $(PYTHON) -m venv .frameworks
	@.frameworks/bin/python -m pip install --quiet --disable-pip-version-check \
	  "$$(grep '^torch==' constraints.txt)" -e '.[frameworks]'
	@.frameworks/bin/python -m pytest -m frameworks tests/frameworks

matrix:
	@sh scripts/matrix.sh

clean:
	rm -rf $(VENV) .matrix .frameworks demo-output bench-output site .mypy_cache .ruff_cache .pytest_cache .hypothesis
