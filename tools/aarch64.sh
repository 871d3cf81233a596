#!/usr/bin/env bash
# Installs what runs AArch64 code on another Linux: a cross compiler and QEMU's user mode, 270 MB, from the distribution
# (Debian, Ubuntu). Does nothing where they are found, or on AArch64 with a C compiler.
set -euo pipefail

packages=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

case "$(uname -sm)" in
"Linux aarch64" | "Linux arm64") if command -v cc >/dev/null; then exit 0; else packages=(gcc libc6-dev); fi ;;
*) if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then exit 0; fi ;;
esac

as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo); fi
if ! command -v apt-get >/dev/null || { [ ${#as_root[@]} -gt 0 ] && ! command -v sudo >/dev/null; }; then
    echo "aarch64.sh: expected apt-get and the right to use it; install by hand what Debian calls ${packages[*]}." >&2
    exit 1
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}"
