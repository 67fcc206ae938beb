# Every target creates the environment in .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all lint bench docs clean

setup: .venv/.ready

# The environment is rebuilt only when a file that names its packages has changed. torch is installed first and
# pinned, so that no other package can pull in a build with CUDA.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,images,shrink,privacy]'
	@touch $@

demo: setup
	$(BIN)/pomona demo

# The suite without the tests marked `slow`: every feature, in at most four minutes on two cores.
test: setup
	$(BIN)/pytest -n 2 -m "not slow"

# The whole suite, as CI runs it.
test-all: setup
	$(BIN)/pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/shrink.py
	$(BIN)/python benchmarks/balanced.py

# The pages whose figures come from results/.
docs: setup
	for page in page results iterand_page balanced_page; do $(BIN)/python benchmarks/$$page.py || exit 1; done
	$(BIN)/python benchmarks/private_cifar.py page
	$(BIN)/python benchmarks/errata.py --page
	$(BIN)/python benchmarks/qian.py --page

clean:
	rm -rf .venv build *.egg-info
