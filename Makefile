EXTRAS := experiments,test,lint,browser
ARGS :=
PART :=
PY := .venv/bin/python

# XLA sizes its CPU thread pool by NPROC; 8 fake devices on few cores can deadlock in a smaller one.
NPROC := 16
export NPROC

# Assertions that pytest has rewritten are kept for the next run, also where Python keeps no bytecode.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo survey sparse gossip stragglers lab loss test test-all mutants test-aot test-gpu gpu test-wheel bench audit lint methods-page docs clean venv

help: ## print this list
	@echo "Every target sets up .venv by itself on its first run."
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  make test ARGS='-k global_qsgd'     arguments for pytest (or for the experiment)"
	@echo "  make test PYTHON=python3.12         another Python; .venv is made anew with it"

demo: venv ## train one model with several methods; compare accuracy and bytes sent
	$(PY) -u -m experiments digits $(ARGS)

survey: venv ## every method, tuned: loss against bytes (half an hour; longer tasks: ARGS='--tasks digits text glyphs')
	$(PY) -u -m experiments survey $(ARGS)

sparse: venv ## everything that sends sparse updates, on a language model (25 minutes)
	$(PY) -u -m experiments sparse $(ARGS)

gossip: venv ## decentralized training on several graphs: MATCHA against D-PSGD, and others (half an hour)
	$(PY) -u -m experiments gossip $(ARGS)

stragglers: venv ## slow workers on a simulated clock: time to the same loss (two hours)
	$(PY) -u -m experiments stragglers $(ARGS)

lab: venv ## steps on slow links, in network namespaces of this machine (Linux; an hour)
	$(PY) -u -m experiments lab $(ARGS)

loss: venv ## time to a held-out loss over slow links, beside PyTorch's DDP (Linux; 45 minutes)
	$(PY) -u -m experiments loss $(ARGS)

# Compiling is most of the time, and LLVM's optimizations are a third of that; the tests on the other
# JAX have them. Some tests wait for processes, so three workers keep two cores busy.
PYTEST = $(PY) -m pytest -n 3 --dist loadgroup --durations=10
test test-all: export XLA_FLAGS += --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
test: venv ## the tests for everyday work: all but the slow ones
	$(PYTEST) -m "not slow" $(ARGS)

test-all: venv ## every test: slow ones, in the browser, docstrings, pages (ARGS='-k NAME': of one method)
	$(PYTEST) tests tests/browser $(ARGS)
	$(PYTEST) --doctest-modules tests/conftest.py jaxcomm pallas_kernels $(ARGS) || test $$? -eq 5 # None is selected.

mutants: venv ## small changes of the library, and which of them the nearest tests notice (half an hour)
	$(PY) tools/mutants.py $(ARGS)

test-aot: ## compile every kernel for TPU and GPU, without either (in .venv-aot, 1.1 GB)
	@$(if $(filter command line,$(origin PYTHON)),JAXCOMM_PYTHON='$(PYTHON)') tools/test_aot $(ARGS)

test-gpu: ## compare the kernels on this machine's GPU with their references
	@$(if $(filter command line,$(origin PYTHON)),JAXCOMM_PYTHON='$(PYTHON)') tools/test_gpu $(ARGS)

gpu: ## all that ten minutes with a GPU can show, or what is left of it (PART="right times"; ARGS=--rehearse: on a CPU)
	@$(if $(filter command line,$(origin PYTHON)),JAXCOMM_PYTHON='$(PYTHON)') tools/gpu $(PART) $(ARGS)

test-wheel: ## build the wheel, install it alone, import all of it, run the README's program, check a typed one (in .venv-wheel)
	@$(if $(filter command line,$(origin PYTHON)),JAXCOMM_PYTHON='$(PYTHON)') tools/test_wheel

bench: venv ## time, memory and compiled programs of every method, beside the last record (25 minutes)
	$(PY) -u -m experiments bench $(ARGS)

audit: venv ## known vulnerabilities of the packages in .venv (in .venv-audit; needs a network)
	@tools/audit $(ARGS)

lint: venv ## formatting, ruff, mypy, spelling, prose
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m codespell_lib
	$(PY) tools/check_prose.py

methods-page: venv ## write docs/methods.md from the catalogue and docs/methods.md.in
	$(PY) -m tests.cases.page

docs: ## build the site, warnings as errors (in .venv-docs; needs a network for its packages only)
	@$(if $(filter command line,$(origin PYTHON)),JAXCOMM_PYTHON='$(PYTHON)') tools/make_venv .venv-docs -e '.[docs]'
	.venv-docs/bin/python tools/build_site.py $(ARGS)

clean: ## remove the virtual environments, caches and builds
	rm -rf .venv .venv-other .venv-aot .venv-audit .venv-docs .venv-wheel build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@$(if $(filter command line,$(origin PYTHON)),JAXCOMM_PYTHON='$(PYTHON)') tools/make_venv .venv -e '.[$(EXTRAS)]'
