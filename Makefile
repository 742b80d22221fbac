# Every target does the set-up it needs, once, in .venv.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export MUJOCO_GL ?= egl

.PHONY: setup demo test check bench evidence clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@sh scripts/system-packages.sh
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup
	$(BIN)/embodied demo

test: setup
	@sh scripts/browser.sh
	$(BIN)/pytest -n 2

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: setup
	$(BIN)/embodied bench envs
	$(BIN)/embodied bench sac
	$(BIN)/embodied bench policy

evidence: setup
	$(BIN)/python -m embodied.evidence

clean:
	rm -rf .venv build *.egg-info
