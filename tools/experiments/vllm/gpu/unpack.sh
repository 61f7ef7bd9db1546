#!/usr/bin/env bash
# On the GPU machine: unpacks the archives that lie beside this script, and checks what they have.
#   unpack.sh [FOLDER]     FOLDER/vllm and FOLDER/pagewire; by default in /tmp/versus
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-/tmp/versus}
unpack() { # unpack ARCHIVE FOLDER: by Python where there is no xz
  mkdir -p "$2"
  if command -v xz >/dev/null; then tar xJf "$1" -C "$2"; else
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="tar")' "$1" "$2"
  fi
}
jobs=()
for file in "$here"/vllm-part-*.tar.xz; do [[ -e $file ]] && { unpack "$file" "$folder/vllm" & jobs+=($!); }; done
[[ -e $here/pagewire.tar.xz ]] && { unpack "$here/pagewire.tar.xz" "$folder/pagewire" & jobs+=($!); }
failed=0
for job in ${jobs[@]+"${jobs[@]}"}; do wait "$job" || failed=1; done

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || failed=1
if [[ -d $folder/pagewire ]]; then
  source=$PWD
  [[ -d $folder/pagewire/source ]] && source=$folder/pagewire/source
  PYTHONPATH=$source:$folder/pagewire python3 -c 'import pagewire.services.executor.devices as devices; print(devices.__file__)' || failed=1
  "$folder/pagewire/bin/nats-server" --version || failed=1
fi
if [[ -d $folder/vllm/vllm ]]; then
  # NVML, which vLLM asks for the GPU, lies there in some containers.
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64:/usr/local/nvidia/lib
  VLLM_NO_USAGE_STATS=1 PYTHONPATH=$folder/vllm python3 "$here/check_vllm.py" || failed=1
fi
exit $failed
