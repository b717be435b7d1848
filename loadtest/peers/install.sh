#!/usr/bin/env bash
# Create the Python environment of a compared engine, and build llama.cpp's programs, unless they exist.
#
#     loadtest/peers/install.sh DIRECTORY NAME PYTHON
#
# The environment is DIRECTORY/NAME. NAME.txt beside this script pins its packages. PYTHON is Kvasir's interpreter.
# llama.cpp is compiled from the source of its Python package: ten minutes on one core. ik_llama.cpp has no package: build
# it yourself. Its model files are written by llama.cpp's environment.
set -eu
pins=$(dirname "$(realpath "$0")")
home=$(realpath -m "$1")/$2
if [ "$2" = ik_llama_cpp ]; then
    if [ -x "$home/bin/llama-batched-bench" ]; then exec bash "$0" "$1" llama_cpp "$3"; fi
    echo "build llama-batched-bench of $(cat "$pins/ik_llama_cpp.txt") and copy it to $home/bin" >&2
    exit 1
fi
torch="torch==$("$3" -c 'import importlib.metadata as m; print(m.version("torch"))')"
wanted="$(sha256sum <"$pins/$2.txt") $torch"
if [ ! -f "$home/.installed" ] || [ "$(cat "$home/.installed")" != "$wanted" ]; then
    "$3" -m venv --clear "$home"
    # Kvasir's build of torch, to avoid gigabytes of CUDA libraries.
    echo "$torch" >"$home/constraints.txt"
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$home/constraints.txt" \
        --requirement "$pins/$2.txt"
    # The registry's torchvision is for another build of torch and fails when transformers imports it.
    "$home/bin/python" -m pip uninstall --quiet --yes torchvision
    echo "$wanted" >"$home/.installed"
fi
if [ "$2" != llama_cpp ] || [ -f "$home/bin/llama-server" ]; then exit 0; fi
if ! command -v c++ >/dev/null; then
    echo "no C++ compiler to build llama.cpp; install one" >&2
    exit 1
fi
rm -rf "$home/source" "$home/build"
mkdir "$home/source"
"$home/bin/python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$home/source" \
    "$(cat "$pins/llama_cpp_source.txt")"
tar -xzf "$home"/source/*.tar.gz -C "$home/source" --strip-components=1
"$home/bin/cmake" -S "$home/source/vendor/llama.cpp" -B "$home/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_MAKE_PROGRAM="$home/bin/ninja" -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
"$home/bin/ninja" -C "$home/build" llama-server llama-batched-bench llama-quantize
cp "$home/build/bin/llama-batched-bench" "$home/build/bin/llama-quantize" "$home/bin"
mv "$home/build/bin/llama-server" "$home/bin"  # last, because its presence skips the build
