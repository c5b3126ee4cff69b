.PHONY: check test bench

check: ; @scripts/check
test: ; @scripts/test
bench: ; @for bench in scripts/bench_*.py; do $${OMNI_BUS_VENV:-.venv}/bin/python $$bench || exit 1; done
