# Every target creates the environment in .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := test,images,shrink,privacy,report,huggingface,lightning,onnx,openvino,track,ray,slurm,docs

.PHONY: setup demo test test-all lint bench chaos docs docs-site release-check clean

setup: .venv/.ready

# The environment is rebuilt only when a file that names its packages has changed. torch is installed first and
# pinned, so that no other package can pull in a build with CUDA.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: setup
	$(BIN)/pomona demo

# The suite without the tests marked `slow`: every feature, in some minutes on two cores.
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
	$(BIN)/python benchmarks/measure/step_overhead.py
	$(BIN)/python benchmarks/measure/shrunk_resnet20.py
	$(BIN)/python benchmarks/measure/balanced_kernels.py

# Kill, truncate and fill training, private and sweep runs 200 times, and give every parser its share of 100,000 damaged
# files: under 20 minutes on two cores.
chaos: setup
	$(BIN)/python benchmarks/measure/chaos.py --faults 200 --fuzz 100000 --json results/chaos.json

# Write README.md and the pages of docs/ whose figures come from results/.
docs: setup
	for page in overhead results iterand balanced privacy errata theory harm export durability language_models \
		sparse_or_fewer_bits readme; do \
		$(BIN)/python benchmarks/pages/$${page}_page.py || exit 1; \
	done

# Build the site in build/site: the pages of docs/, a page for each method, the examples and the API. A warning fails.
docs-site: setup
	$(BIN)/python benchmarks/pages/site_source.py build/site-source
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs build/site-source build/site
	@echo "open build/site/index.html"

# Build the source distribution and the wheel, install the wheel in new environments and run it there: some minutes.
release-check: setup
	$(BIN)/python .ci/release_check.py

clean:
	rm -rf .venv build dist *.egg-info
