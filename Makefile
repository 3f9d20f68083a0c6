# Each target works alone on a fresh machine with python3 (3.11 or later) and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LAB    := lab/lab

.PHONY: help install test identity tamper rehearse bench bench-evidence faults lab lab-needle lab-full lab-measure lab-identity lab-down clean

help:
	@echo "make rehearse    the whole acceptance on two emulated ranks (needs nothing but pip; under 3 minutes)"
	@echo "make test        ruff, mypy --strict and the plugin's own tests"
	@echo "make identity    the generated list: every leaf of what is read and planned, changed once, must be refused"
	@echo "make tamper      the generated list: every file and every number of a pack, changed once, must be found; planted secrets"
	@echo "make bench-evidence  what a row and a verification cost"
	@echo "make bench       our streaming client beside its peers, which it installs from PyPI (4 GB; about half an hour;"
	@echo "                 BENCH_ARGS=--quick: two levels, with the peers that are there; docs/bench.md)"
	@echo "make lab         two real hosts on this machine (root, Linux, Debian): Docker, ssh, real vLLM on CPU"
	@echo "make lab-needle  the needle lane on the lab's long window (after make lab)"
	@echo "make faults      every row of docs/faults.md on emulated ranks, as processes and on the lab's hosts (after make lab)"
	@echo "make lab-full    the rows of real vLLM, signals and a missed needle on the lab (after make lab; about half an hour)"
	@echo "make lab-measure   both sides' rates and what makes a row void on the lab (after make lab)"
	@echo "make lab-identity  doctor, frozen manifests, edited files and weights, the mutation list on the lab (after make lab)"
	@echo "make lab-down    stop both lab hosts; make lab-down WIPE=--wipe also removes their state"

# dev tools are wanted by `make test` alone
$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[report]'
	@touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet -e '.[report,dev]'
	@touch $@

install: $(BIN)/.installed

test: $(BIN)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd pytest_dspark/rehearsal && $(CURDIR)/$(BIN)/mypy --strict --config-file= --cache-dir=$(CURDIR)/.mypy_cache/rehearsal rank.py
	$(BIN)/python -m pytest tests -n 3 --dist worksteal

identity: $(BIN)/.installed-dev
	$(BIN)/python -m pytest tests/test_identity.py -q -s -n0

tamper: $(BIN)/.installed-dev
	$(BIN)/python -m pytest tests/test_packs.py tests/test_projection.py -q -n0

bench-evidence: $(BIN)/.installed
	$(BIN)/python -m benchmarks.evidence

rehearse: $(BIN)/.installed
	$(BIN)/python -m pytest suites -m production --dspark-cluster rehearsal

bench: $(BIN)/.installed
	$(BIN)/python -m benchmarks.bench $(BENCH_ARGS)

lab: $(BIN)/.installed
	$(LAB) all
	$(LAB) on gb-head $(CURDIR)/$(BIN)/python -m pytest suites -m production --dspark-cluster lab/cluster.toml

lab-needle: $(BIN)/.installed
	$(LAB) on gb-head $(CURDIR)/$(BIN)/python -m pytest suites -m long1m --dspark-cluster lab/cluster.toml

# FAULTS narrows, as in FAULTS="emulated and link": a part without such a row is passed over, a name without any row is an error.
MATRIX = $(BIN)/python -m pytest lab/test_matrix.py -p no:cacheprovider
ANY_OF_THEM = $(if $(FAULTS),$(MATRIX) -q --collect-only -k "($(1)) and ($(FAULTS))")
NONE_OF_THEM = $(if $(FAULTS),|| test $$? = 5)

# The emulated rank's image is made anew if the rank was changed.
faults: $(BIN)/.installed-dev
	$(call ANY_OF_THEM,rehearsal or emulated)
	$(LAB) up
	$(LAB) emulated
	$(LAB) overlay
	$(MATRIX) -n 2 -k "rehearsal and ($(or $(FAULTS),e))" $(NONE_OF_THEM)
	$(MATRIX) -k "emulated and ($(or $(FAULTS),e))" $(NONE_OF_THEM)
	$(LAB) on gb-head $(CURDIR)/$(BIN)/python -m pytest lab/test_faults.py -k "image or label or dirty or knob"

lab-full: $(BIN)/.installed-dev
	$(call ANY_OF_THEM,real)
	$(LAB) up
	$(LAB) overlay
	$(MATRIX) -k "real and ($(or $(FAULTS),e))" $(NONE_OF_THEM)
	$(LAB) on gb-head $(CURDIR)/$(BIN)/python -m pytest lab/test_faults.py

lab-measure: $(BIN)/.installed-dev
	$(LAB) on gb-head $(CURDIR)/$(BIN)/python -m pytest lab/test_measure.py -s

lab-identity: $(BIN)/.installed-dev
	$(LAB) on gb-head $(CURDIR)/$(BIN)/python -m pytest lab/test_identity.py lab/test_mutations.py -s

lab-down:
	$(LAB) down $(WIPE)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
