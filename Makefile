.PHONY: check test bench

check: ; @scripts/check
test: ; @scripts/test
bench: ; @$${OMNI_BUS_VENV:-.venv}/bin/python scripts/bench_all
