# Every target does the set-up it needs, once, in .venv.
PYTHON ?= python3
BIN := .venv/bin
NAMES ?= envs sac policy
export OMP_NUM_THREADS ?= 1
export MUJOCO_GL ?= egl

.PHONY: setup demo test test-all nightly check docs wheel bench evidence clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@sh scripts/system-packages.sh
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,docs]"
	@touch $@

demo: setup
	$(BIN)/embodied demo

test: setup
	@sh scripts/browser.sh
	$(BIN)/pytest -n 2

test-all: setup
	@sh scripts/browser.sh
	$(BIN)/pytest -n 2 --all

nightly: setup
	@for robot in $$(basename -s .yaml configs/robot/*sim*.yaml); do \
		$(BIN)/python -m tests.real_robot.long_run $$robot 1000000 || exit 1; \
		$(BIN)/python -m tests.real_robot.modes $$robot 100000 || exit 1; \
	done
	$(BIN)/python -m tests.real_robot.mutation

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python scripts/prose.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site: build/site/index.html"

wheel: setup
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .

bench: setup
	@for name in $(NAMES); do $(BIN)/python -m benchmarks.$$name || exit 1; done

evidence: setup
	$(BIN)/python -m benchmarks.evidence
	$(BIN)/python -m benchmarks.papers

clean:
	rm -rf .venv build *.egg-info
