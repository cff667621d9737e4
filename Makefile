# make demo   set up, then fine-tune a pretrained transformer under differential privacy on real text
# make test   set up, then lint, types, doctests and tests
# make test COVERAGE=1   the same, and which lines of dpfunc run; takes a sixth longer; CI runs this
# make docs   the site, in build/site, looked at in a browser (chromium, chromium-driver); CI builds it too
# make bench  every benchmark in one go, and each target beside what was measured: about two hours on two cores
# make survey   which engine takes each model family
# make jax    JAX Privacy in an environment of its own, for make bench, which compares with it where it is installed
# make opake  opake in a folder of its own, for make bench
# make gpu    the tests and benchmarks that need a GPU, in at most ten minutes
# make test-torch TORCH=2.14.1   tests of engines, steps, LoRA and Transformers on another torch, in an environment of its own
# make test-slow   the tests that take long: whole runs of examples and commands, vision models; CI runs both
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-slow test-torch docs downloads check bench survey jax opake gpu house clean

help:
	@grep '^# make' Makefile | sed 's/^# //'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its pinned version keeps other packages from pulling a larger build
$(VENV)/demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/dev: $(VENV)/demo
	$(PIP) -e '.[dev]'
	@touch $@

# apart from the environment: torchvision's compiled part is built for another torch, and half of it would break others
$(VENV)/vision: $(VENV)/dev
	$(PIP) --no-deps --target .cache/vision timm torchvision
	@touch $@

$(VENV)/docs: $(VENV)/demo
	$(PIP) -e '.[docs]'
	@touch $@

demo: $(VENV)/demo
	$(BIN)/python examples/main_job/fetch.py
	$(BIN)/python examples/main_job/train.py $(ARGS)

check: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

downloads: $(VENV)/dev .cache/dp_accounting/installed
	$(BIN)/python examples/main_job/fetch.py
	$(BIN)/python examples/language_model/fetch_smollm.py
	$(BIN)/python examples/vqa/downloads.py

# apart from the environment: it wants an old attrs, and a test of docs/guides/certificate.md alone looks for it
.cache/dp_accounting/installed: Makefile $(BIN)/python
	$(PIP) --no-deps --target .cache/dp_accounting dp-accounting==0.6.0 absl-py==2.5.1 attrs==23.2.0 dm-tree==0.1.10 \
		mpmath==1.3.0 wrapt==2.5.2
	@touch $@

# Tests start many processes, and each would compile the source anew where the environment forbids to keep bytecode.
# Files begin in the order of tests/conftest.py.
# One process more than there are cores: tests of several processes, and of programs, wait for theirs a quarter of the time.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Lines of dpfunc that the tests run in their own processes; those of the programs that they start are not seen.
MEASURED := -m slipcover --source dpfunc --json --out build/coverage.json
PYTHON_TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python

test: check downloads
	@mkdir -p build
	$(PYTHON_TESTS) $(if $(COVERAGE),$(MEASURED)) $(PYTEST) -m "not slow" $(ARGS)
	@$(if $(COVERAGE),$(BIN)/python -m slipcover --merge build/coverage.json --out build/coverage.json \
		--fail-under $(if $(ARGS),0,92) >build/coverage.txt; result=$$?; tail -n 1 build/coverage.txt; exit $$result)

# only files with slow tests: to collect the others takes as long as several of these tests
test-slow: $(VENV)/vision downloads
	$(PYTHON_TESTS) $(PYTEST) -m slow $$(grep -rl 'mark[.]slow' tests --include='test_*.py') $(ARGS)

# torch and torchvision in the versions that are named here, and all others as in the environment.
TORCH ?= 2.14.1
OTHER := .cache/torch-$(TORCH)
TORCH_TESTS := $(addprefix tests/,engines functional lora hf test_step.py test_clipped.py cli/test_doctor.py) dpfunc/engines

$(OTHER)/installed: Makefile constraints.txt constraints-$(TORCH).txt
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	cat constraints-$(TORCH).txt >$(OTHER)/constraints.txt
	grep -vxF -f constraints-$(TORCH).txt constraints.txt | grep -v -E \
		"^($$(sed -n 's/==.*//p' constraints-$(TORCH).txt | paste -s -d '|'))==" >>$(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt torchvision timm -e '.[test]'
	@touch $@

test-torch: $(OTHER)/installed downloads
	PYTHONDONTWRITEBYTECODE= $(OTHER)/bin/python $(PYTEST) -m "not slow" $(TORCH_TESTS) $(ARGS)

# apart from the environment: dpfunc does not need it, and it would pin packages that others need
jax: .cache/jax/installed

.cache/jax/installed: Makefile
	$(PYTHON) -m venv .cache/jax
	.cache/jax/bin/python -m pip install --quiet --disable-pip-version-check jax-privacy==2.0.0 jax==0.10.2
	@touch $@

# apart from the environment as well: only the process that measures it reads this folder
opake: .cache/opake/installed

.cache/opake/installed: Makefile $(BIN)/python
	$(PIP) --no-deps --target .cache/opake opake-accounting==0.16.1 opake-base==0.16.1 opake-dpsgd==0.16.1 \
		opake-engine==0.16.1 optree==0.20.0
	@touch $@

# Without JAX Privacy the table says that it is not installed. One thread a process; freed memory stays with its process,
# for every contestant (benchmarks/freed_memory.py says why).
CONTESTANTS := plain,vmap,ghost,auto,captured,opacus-hooks,opacus-ghost,opacus-functorch
WITH_JAX := plain,auto,jax-plain,jax-privacy,jax-privacy/1,jax-privacy/4,jax-privacy/8,whole-plain,whole-dpfunc,whole-jax
bench: export OMP_NUM_THREADS := 1
bench: export MALLOC_MMAP_MAX_ := 0
bench: export MALLOC_TRIM_THRESHOLD_ := 1000000000000
bench: $(VENV)/dev
	-$(MAKE) jax
	-$(MAKE) opake
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.noise_cost
	$(BIN)/python -m benchmarks.small_steps
	$(BIN)/python -m benchmarks.distributed
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.freed_memory
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.engines --engines $(CONTESTANTS)
	$(BIN)/python -m benchmarks.engines --engines $(CONTESTANTS) --cases layer:lstm --append
	$(BIN)/python -m benchmarks.engines --engines $(WITH_JAX) --cases w1,w4,w3,mnist,w2n,w4f,perceptron,small,t1024,embed,w2 \
		--out benchmarks/results/engines_jax.json
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.rows
	$(BIN)/python -m benchmarks.launches
	$(BIN)/python -m benchmarks.targets

# every model family of the extra: which engine takes it
survey: $(VENV)/dev
	$(BIN)/python -m benchmarks.survey

# at most ten minutes; without a GPU it says so, and the exit code is not 0
gpu: $(VENV)/dev
	$(BIN)/python -m benchmarks.gpu

# the variable takes away a note of mkdocs-material about its own future, which is no warning about these pages
docs: $(VENV)/docs downloads
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/site.py

house: $(VENV)/dev
	$(BIN)/python tools/house.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
