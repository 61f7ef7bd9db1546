#!/usr/bin/env bash
# On a machine with a network: packs what vllm_gpu needs and the GPU machine lacks, as archives of at most 55 MiB each.
#   pack.sh OUT [VLLM_WHEEL]
# OUT/vllm-part-*.tar.xz: vLLM for Hopper and its missing dependencies. OUT/pagewire.tar.xz: Pagewire's dependencies.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
wheel=${2:-vllm===0.26.0}
build=${BUILD:-$(mktemp -d)}
mkdir -p "$build"
site=$build/vllm ours=$build/pagewire
rm -rf "$site" "$ours" "$out"/vllm-part-*.tar.* "$out"/pagewire.tar.*

# The GPU machine has Python 3.12 on x86-64 with glibc 2.39; which Python runs this script does not matter.
platforms=()
for minor in 39 38 35 34 31 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
fetch() { # fetch TARGET REQUIREMENT...
  python3 -m pip install -q --no-deps --no-compile --no-cache-dir --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --target "$@"
}

fetch "$site" "$wheel"
fetch "$site" -r "$here/vllm-requirements.txt" --upgrade
fetch "$ours" -r "$here/pagewire-requirements.txt"
chmod +x "$ours"/bin/*
mkdir "$ours/pagewire-0.1.0.dist-info" # Pagewire asks for its own version
printf 'Metadata-Version: 2.1\nName: pagewire\nVersion: 0.1.0\n' >"$ours/pagewire-0.1.0.dist-info/METADATA"

# Left out: attention for other GPUs (FA2; FA3 is Hopper's), kernels of mixtures of experts, of DeepSeek's attention and
# products, of 4-bit floats, and the Rust frontend, which is off by default. vLLM imports all of these if they are there.
cd "$site"
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/_moe_C_stable_libtorch.abi3.so vllm/_flashmla* vllm/_qutlass_C* \
  vllm/vllm-rs vllm/third_party/{deep_gemm,fmha_sm100,flashmla} vllm/distributed/kv_transfer/*.jpg xgrammar/lib bin
python3 "$here/hopper_only.py" vllm/_C_stable_libtorch.abi3.so
find . "$ours" -name '*.so' -size +100k -exec strip --strip-unneeded {} + # symbols for debuggers
find . "$ours" \( -name __pycache__ -o -name tests -path '*/xgrammar/*' \) -prune -exec rm -rf {} +

pack() { tar c --sort=name --owner=0 --group=0 --mtime=@0 -C "$1" "${@:3}" | xz -T1 -9 >"$2"; } # each 0.7 GB of memory
binaries=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
pack "$site" "$out/vllm-part-1.tar.xz" "${binaries[@]}" &
first=$!
pack "$site" "$out/vllm-part-2.tar.xz" "${binaries[@]/#/--exclude=./}" .
pack "$ours" "$out/pagewire.tar.xz" .
wait $first
cp "$here/unpack.sh" "$out"
du -ch --apparent-size "$out"/*
