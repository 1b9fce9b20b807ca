# `make demo` and `make test` do everything on a fresh Debian 12: install what is missing, build in
# build/release, run. A second run needs no network.

BUILD := build/release
# The packaged CMake where there are several.
BIN := $(if $(wildcard /usr/bin/cmake),/usr/bin/)
CMAKE := $(BIN)cmake
CTEST := $(BIN)ctest
PREFIX ?= /usr/local
REPLAY := replay examples/mooncake_conversation.jsonl --requests 24 --tp 16 --report report.html

.PHONY: demo test bench install format clean packages configure

demo: configure
	ninja -C $(BUILD) sparsemla_cli
	$(BUILD)/tools/sparsemla $(REPLAY)

test: configure
	ninja -C $(BUILD)
	$(CTEST) --test-dir $(BUILD) --output-on-failure --parallel 2

bench: configure
	ninja -C $(BUILD) sparsemla_bench
	$(BUILD)/bench/sparsemla_bench

install: configure
	ninja -C $(BUILD) sparsemla sparsemla_cli
	$(CMAKE) --install $(BUILD) --prefix $(PREFIX)

format:
	scripts/install_packages.sh ci
	git ls-files '*.c' '*.cc' '*.h' | xargs clang-format-14 -i

clean:
	rm -rf build report.html

packages:
	@scripts/install_packages.sh build

configure: packages
	@test -f $(BUILD)/build.ninja || $(CMAKE) --preset release
