#!/usr/bin/env bash
# Installs what runs emitted C on other machines: cross compilers for AArch64, 32-bit ARM, big-endian s390x and Cortex-M,
# QEMU's user mode, and QEMU's boards with a Cortex-M, from the distribution (Debian, Ubuntu). Also simulators of Verilog and
# VHDL, a synthesis tool, and clang, which finds races between threads. Does nothing where they are found.
set -euo pipefail

packages=()
need() { command -v "$1" >/dev/null || packages+=("${@:2}"); }
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
need arm-linux-gnueabihf-gcc gcc-arm-linux-gnueabihf libc6-dev-armhf-cross
need s390x-linux-gnu-gcc gcc-s390x-linux-gnu libc6-dev-s390x-cross
need arm-none-eabi-gcc gcc-arm-none-eabi libnewlib-arm-none-eabi
need qemu-s390x qemu-user
need qemu-system-arm qemu-system-arm
need clang clang libomp-dev
# which holds clang's libraries of sanitizers; Debian's clang only recommends the one of its own version
ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.tsan-*.a >/dev/null 2>&1 || packages+=("$(apt-cache depends clang 2>/dev/null |
    sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p' | head -1)")
need iverilog iverilog
need ghdl ghdl
need yosys yosys
if [ ${#packages[@]} -eq 0 ]; then exit 0; fi

as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo); fi
if ! command -v apt-get >/dev/null || { [ ${#as_root[@]} -gt 0 ] && ! command -v sudo >/dev/null; }; then
    echo "cross.sh: expected apt-get and the right to use it; install by hand what Debian calls ${packages[*]}." >&2
    exit 1
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}"
