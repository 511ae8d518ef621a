# make train · test · coverage · check · fix · kernels · test-gpu · gpu-check · soak · bench · profile        ARGS, RANKS, TORCH, EXTRA and PYTHON may be set on the command line
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
EXTRA  ?=
RANKS  ?= 2
ARGS   ?=
BIN    := .venv/bin
PIP    := $(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt
,      := ,

.PHONY: train test coverage check fix kernels test-gpu gpu-check soak bench profile clean FORCE
.DEFAULT_GOAL := check

train: .venv/installed  ## two ranks train a byte-level GPT; ARGS="--algorithm onebit_adam --ranks 3", ARGS=--help
	@$(BIN)/python examples/train_gpt.py --ranks $(RANKS) $(ARGS)

test: .venv/dev  ## the whole suite; ARGS="-k bucket" for a part
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: .venv/dev  ## the same, with branch coverage of the ranks too (half as fast)
	$(BIN)/pytest --cov $(ARGS)

check: .venv/dev  ## what needs no run: lint, format, types, layers, CHANGELOG against the version
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/pytest -q -p no:cacheprovider tests/test_project.py -k version

kernels: .venv/dev  ## compile kernels/ for sm_70 to sm_120; registers, stack and shared memory of each
	$(BIN)/python tools/compile_kernels.py

# On a machine with a GPU nothing is installed: the Python that has a CUDA build of torch runs the checkout as it is.
HERE := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

test-gpu:  ## the tests that need a CUDA device
	$(HERE) -m pytest -m gpu $(ARGS)

gpu-check:  ## everything that only a GPU can show, under 4 minutes; ARGS="--nccl PATH", ARGS=--help
	$(HERE) tools/gpu_check $(ARGS)

soak: .venv/dev  ## two minutes of random trainings with killed ranks; ARGS="--minutes 60 --seed 7", ARGS=--help
	$(BIN)/python tools/soak $(ARGS)

bench: .venv/dev  ## every collective measured and checked; ARGS="--ranks 3 -e 64M", ARGS=--host, ARGS=--help
	$(BIN)/python tools/comm_bench.py --ranks $(RANKS) $(ARGS)

profile: .venv/dev  ## train a little with traces, and say where the time goes; ARGS="--size medium --bucket-cap-mb 4"
	rm -rf build/traces
	$(BIN)/python examples/train_gpt.py --ranks $(RANKS) --steps 60 --no-compare-ddp --trace build/traces $(ARGS)
	$(BIN)/python tools/trace_report.py build/traces --merge build/traces.json

fix: .venv/dev  ## what ruff can mend by itself
	$(BIN)/ruff check --fix && $(BIN)/ruff format

clean:
	rm -rf .venv dist build .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# Installed again only when pyproject.toml, the constraints, TORCH or EXTRA change. For a CUDA build:
#   make train TORCH="torch==2.13.0 --index-url https://…" EXTRA=cu12 ARGS="--device cuda"      (cu12 or cu13, never both)
.venv/installed: pyproject.toml constraints.txt .venv/choice
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "installing into .venv: $(TORCH), bagua-rt (minutes, the first time)"
	@$(PIP) $(TORCH)
	@$(PIP) -e ".[examples$(if $(EXTRA),$(,)$(EXTRA))]"
	@touch $@

# Tests also need the tools, and the CUDA libraries for what runs on the emulated GPU.
.venv/dev: .venv/installed
	@echo "installing the tools and the CUDA libraries into .venv"
	@$(PIP) -e ".[dev,examples,$(or $(EXTRA),cu12)]"
	@touch $@

.venv/choice: FORCE
	@mkdir -p .venv && echo "$(TORCH) $(EXTRA)" | cmp -s - $@ || echo "$(TORCH) $(EXTRA)" > $@
