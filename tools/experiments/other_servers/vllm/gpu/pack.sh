#!/usr/bin/env bash
# On a machine with a network: packs what a machine with a Hopper GPU and without a network lacks.
#   pack.sh OUT [CHECKOUT [VLLM]]
# OUT/vllm-part-*.tar.xz have vLLM and the packages that it imports, OUT/pagewire.tar.xz the packages that Pagewire imports
# and, with a CHECKOUT, its source. VLLM is a wheel or a requirement. The GPU machine has Python 3.12 on x86-64, PyTorch
# 2.11, Triton 3.6 and transformers 5. It takes four minutes of one core and 330 MB of downloads.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
checkout=${2:-}
vllm=${3:-vllm===0.26.0}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
theirs=$build/vllm ours=$build/pagewire
rm -f "$out"/vllm-part-*.tar.* "$out"/pagewire.tar.*

platforms=()
for minor in 39 38 35 34 31 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
fetch() { # fetch FOLDER REQUIREMENT...: packages of that machine's Python, whichever runs this script
  python3 -m pip install -q --no-deps --no-compile --no-cache-dir --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --target "$@"
}
fetch "$theirs" "$vllm"
fetch "$theirs" -r "$here/vllm-requirements.txt" --upgrade
fetch "$ours" -r "$here/pagewire-requirements.txt"
chmod +x "$ours"/bin/*
mkdir "$ours/pagewire-0.1.0.dist-info" # Pagewire asks for its own version
printf 'Metadata-Version: 2.1\nName: pagewire\nVersion: 0.1.0\n' >"$ours/pagewire-0.1.0.dist-info/METADATA"

# Left out is what a dense bf16 model with greedy sampling does not use on Hopper: FlashAttention 2, kernels of mixtures of
# experts, of DeepSeek's attention and of 4-bit floats, and the Rust frontend. vLLM imports each only if it is there.
cd "$theirs"
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/_moe_C_stable_libtorch.abi3.so vllm/_flashmla* vllm/_qutlass_C* \
  vllm/vllm-rs vllm/third_party/{deep_gemm,fmha_sm100,flashmla} vllm/distributed/kv_transfer/*.jpg xgrammar/lib bin
python3 "$here/keep_hopper_code.py" vllm/_C_stable_libtorch.abi3.so
find . "$ours" -name '*.so' -size +100k -exec strip --strip-unneeded {} +
find . "$ours" \( -name __pycache__ -o -name tests -path '*/xgrammar/*' \) -prune -exec rm -rf {} +

if [[ -n $checkout ]]; then
  mkdir "$ours/source"
  (cd "$checkout" && git archive HEAD pyproject.toml README.md pagewire services shared kernels bench tools) |
    tar x -C "$ours/source" --exclude=bench/results --exclude='*.safetensors' --exclude=tools/bundled_model
fi

pack() { # pack FOLDER ARCHIVE FILE...: takes 0.7 GB of memory
  tar c --sort=name --owner=0 --group=0 --mtime=@0 -C "$1" "${@:3}" | xz -T1 -9 >"$2"
}
binaries=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
pack "$theirs" "$out/vllm-part-1.tar.xz" "${binaries[@]}" &
first=$!
pack "$theirs" "$out/vllm-part-2.tar.xz" "${binaries[@]/#/--exclude=./}" .
pack "$ours" "$out/pagewire.tar.xz" .
wait $first
cp "$here"/{unpack.sh,check_vllm.py} "$out"
du -h "$out"/*
