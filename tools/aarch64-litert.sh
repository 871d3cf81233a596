#!/usr/bin/env bash
# Makes an AArch64 Python with LiteRT that runs on any Debian, under QEMU's user mode.
#
#   tools/aarch64-litert.sh DIR        then: export QJAX_AARCH64_PYTHON=DIR/python
#
# Python and its libraries come from the distribution's arm64 packages, unpacked into DIR without installing them (apt keeps
# lists and downloads of its own there), the packages of PyPI as wheels: 55 MB to download, 15 seconds, 170 MB unpacked. On an
# AArch64 machine DIR/python is a virtual environment.
# (Ubuntu keeps arm64 packages in another archive, ports.ubuntu.com, which apt's sources must then name.)
# Nothing outside of DIR changes, except that QEMU is installed where it is missing (tools/aarch64.sh).
set -euo pipefail

dir=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
litert=2.3.0
stamp="$dir/.stamp"
wanted=$(cksum "${BASH_SOURCE[0]}")
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

# a virtual environment for pip, which a distribution's Python may lack
base=$("$here/find-python" 3.13 3.12 3.11)
rm -rf "$dir/root" "$dir/apt" "$dir/host"
"$base" -m venv "$dir/host"
python="$dir/host/bin/python"

case "$(uname -sm)" in
"Linux aarch64" | "Linux arm64")
    "$python" -m pip install -qq "ai-edge-litert==$litert"
    ln -sf host/bin/python "$dir/python"
    echo "$wanted" >"$stamp"
    exit 0
    ;;
esac

"$here/aarch64.sh"
mkdir -p "$dir"/root "$dir"/apt/{state/lists/partial,cache/archives/partial} && touch "$dir/apt/state/status"
cat >"$dir/apt/apt.conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$dir/apt/state";
Dir::State::status "$dir/apt/state/status";
Dir::Cache "$dir/apt/cache";
Debug::NoLocking "true";
CONF
export APT_CONFIG="$dir/apt/apt.conf"
apt-get update -qq
apt-get install -y -qq --no-install-recommends --download-only python3-minimal libpython3-stdlib libstdc++6
unset APT_CONFIG
for package in "$dir"/apt/cache/archives/*.deb; do dpkg -x "$package" "$dir/root"; done
rm -rf "$dir/apt"

# LiteRT reads the processor's caches, which an x86 kernel describes in a way that it does not survive. QEMU looks for files in
# its root first: there stands one Cortex-A72. Which instructions exist, QEMU itself says.
cpu="$dir/root/sys/devices/system/cpu"
mkdir -p "$cpu/cpu0/topology" "$dir/root/proc"
for file in possible present kernel_max cpu0/topology/physical_package_id cpu0/topology/cluster_cpus_list; do
    echo 0 >"$cpu/$file"
done
cat >"$dir/root/proc/cpuinfo" <<CPU
processor	: 0
BogoMIPS	: 100.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd08
CPU revision	: 3

CPU

program=$(find "$dir/root/usr/bin" -name 'python3.*' -type f | head -n 1)
version=${program##*python}
"$python" -m pip download -qq --no-deps --only-binary=:all: --dest "$dir/wheels" --implementation cp \
    --python-version "$version" --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux2014_aarch64 "ai-edge-litert==$litert" numpy
for wheel in "$dir"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$dir/root/site"; done
rm -rf "$dir/wheels" "$dir/host"

# QEMU 7.2 emulates SME, with which XNNPACK's products come out wrong by up to 255 codes; every other processor that it knows,
# from the Cortex-A53 to this one with dot products, i8mm and SVE, gives the same codes.
emulator=$(qemu-aarch64 --version | sed -n '1s/.*version \([0-9.]*\).*/qemu-aarch64 \1/p')
cat >"$dir/python" <<RUN
#!/bin/sh
root="$dir/root"
exec qemu-aarch64 -L "\$root" -cpu "\${QJAX_AARCH64_CPU:-max,sme=off}" -E PYTHONHOME="\$root/usr" \\
    -E PYTHONPATH="\$root/site" -E QJAX_EMULATOR="$emulator" "$program" "\$@"
RUN
chmod +x "$dir/python"
"$dir/python" -c "import ai_edge_litert.interpreter"
echo "$wanted" >"$stamp"
