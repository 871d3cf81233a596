#!/usr/bin/env bash
# Builds ggml, the library in which llama.cpp quantizes and multiplies (here with AVX2), from the source package llama-cpp-python, into the folder .ggml.
#
#   tools/ggml.sh PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.3.36
if [ -e ".ggml/$version-cpu" ]; then exit 0; fi
rm -rf .ggml
"$1" -m venv .ggml/venv
.ggml/venv/bin/pip install -q cmake ninja
.ggml/venv/bin/pip download -q --no-deps --no-binary :all: "llama-cpp-python==$version" -d .ggml
tar xzf ".ggml/llama_cpp_python-$version.tar.gz" -C .ggml
export PATH="$PWD/.ggml/venv/bin:$PATH"
cmake -S ".ggml/llama_cpp_python-$version/vendor/llama.cpp" -B .ggml/build -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \
    -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_COMMON=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >.ggml/log
ninja -C .ggml/build ggml-base ggml-cpu >>.ggml/log
touch ".ggml/$version-cpu"
