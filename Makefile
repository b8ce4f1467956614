# make compare   time a decode step in every run; without a GPU, size it up on a stored machine
# make test      every test that needs no GPU
# make gpu       every test that needs one; writes tests/gpu_record.json
# make lint      ruff and clang-format, changing nothing
# make clean     remove what the others made
#
# On first use, and whenever pyproject.toml changes, each installs what it needs into .venv, made with BASE_PYTHON.
# PYTHON=/path/to/python takes that interpreter as it is instead: no environment, no pip.
# ARGS is passed on: make test ARGS='-k layout', make compare ARGS='--batch 4'.

BASE_PYTHON ?= python3
PROGRAM ?= llama-3.2-1b
RECORD ?= tests/gpu_record.json
ARGS ?=

# The extra that suits the driver: the head of nvidia-smi's table names the newest CUDA that it runs. Without a driver: none.
cuda := $(if $(filter compare gpu,$(MAKECMDGOALS)),$(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p'))
cuda_extra := $(if $(cuda),$(if $(filter 12,$(cuda)),cuda12,cuda13))

extras_compare := $(cuda_extra)
extras_test := test compiler figures
extras_gpu := test models $(cuda_extra)
extras_lint := lint

ifdef PYTHON
python := $(PYTHON)
ready :=
else
python := .venv/bin/python
ready = .venv/ready-$@
endif

.PHONY: compare test gpu lint clean
.SECONDEXPANSION:

compare: $$(ready)
	$(python) -c 'import sys; from cuk.cli import main; sys.exit(main())' compare $(PROGRAM) $(ARGS)

test: $$(ready)
	$(python) -m pytest tests/host $(ARGS)

gpu: $$(ready)
	$(python) -m pytest tests/gpu -m gpu --gpu-record $(RECORD) $(ARGS)

lint: $$(ready)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	find . -name .venv -prune -o '(' -name '*.cu' -o -name '*.cuh' ')' -print | sort | xargs $(python) -c 'import clang_format as c; c.clang_format()' --dry-run --Werror

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

empty :=
comma := ,
.venv/ready-%: pyproject.toml | .venv/made
	.venv/bin/python -m pip install --quiet --editable '.$(if $(extras_$*),[$(subst $(empty) $(empty),$(comma),$(strip $(extras_$*)))])'
	touch $@

.venv/made:
	$(BASE_PYTHON) -m venv --clear .venv
	touch $@
