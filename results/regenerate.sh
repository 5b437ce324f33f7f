#!/usr/bin/env bash
# Measures again what the documents quote, on this machine's GPU, from a clean checkout of one commit. Records of earlier
# tools, which README.md lists, have no piece.
#   results/regenerate.sh FOLDER [PIECE ...]     FOLDER: such as results/nvidia-h200; default: all pieces
# Each piece takes at most ten minutes on an H200, but those of Liger's experts, whose search compiles for minutes for each
# size, and false-alarms. One that is there already is kept (delete its folder to repeat it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pieces="forward forward-llama3-8b forward-others forward-narrow activation step-mlp step-peers step-accumulate step step-llama3-8b step-others \
  energy backward memory memory-mlp experts experts-qwen3 experts-others experts-fp8 experts-peers experts-quack \
  experts-quack-step experts-zipf experts-liger experts-liger-few experts-liger-step \
  experts-liger-step-deepseek experts-few experts-few-zipf experts-few-layers experts-few-layers-others \
  experts-step experts-step-zipf experts-step-deepseek experts-step-zipf-deepseek experts-memory \
  experts-memory-peers experts-eager experts-eager-few experts-eager-step experts-eager-step-others \
  fp8 fp8-blocks fp8-mlp fp8-mlp-rows fp8-mlp-blocks train-llama train-fp8 tp tp-experts verify selftest false-alarms audit noise doctor \
  random-forward random-step random-step-mlp step-ragged kernels-by-triton patched-llama sweep-over-gpus"
if [ $# -lt 1 ]; then
  echo "Give the folder for the results, and which of these, if not all: $pieces" >&2
  exit 2
fi
if [ -n "$(git status --porcelain --untracked-files=no -- swiglu_bench kernels configs pyproject.toml)" ]; then
  echo "The checkout has changes that no commit holds; commit them first, so that results name the code that they are of." >&2
  exit 2
fi
folder=$1
shift
mkdir -p "$folder"
bench="python -m swiglu_bench"
peers=eager,compile,liger,fused-auto,fused-mlp-auto,quack
fp8=eager,compile,fused-auto,fused-mlp-auto,scaled-mm,scaled-mm-compile,scaled-mm-blocks,scaled-mm-blocks-compile,torchao-float8,fused-fp8
experts=grouped,grouped-compile,fused-experts,fused-experts-recompute
widths=4096x11008,4096x14336,5120x13824,5120x17408,6144x16384,8192x28672,3584x18944,4096x12288,5120x25600,7168x18432
others=mistral-7b,llama3-70b,qwen2.5-7b,qwen3-32b,gpt-oss,mixtral-expert,deepseek-v3-expert

sweep() { # NAME COMMAND OPTION...
  local name=$1
  shift
  [ -e "$folder/$name" ] || $bench "$@" --out "$folder/$name" || [ $? -eq 1 ]
}

for piece in ${*:-$pieces}; do
  echo "== $piece"
  case $piece in
    forward)
      sweep forward forward --shapes llama7b --tokens 1,16,128,512,1k,2k,4k,8k,16k --budget 3 --no-energy \
        --impl eager,eager-packed,compile,compile-packed,liger,unsloth,fused,quack ;;
    forward-llama3-8b)
      sweep forward-llama3-8b forward --shapes llama3-8b --tokens 1,16,128,512,1k,2k,4k,8k,16k --budget 2.5 --no-energy \
        --impl eager,compile,liger,fused,quack ;;
    forward-others)
      sweep forward-others forward --shapes $others --tokens 4k --budget 1.5 --no-energy --impl eager,compile,liger,fused,quack ;;
    forward-narrow)
      sweep forward-narrow forward --shapes deepseek-v3-expert,gpt-oss --tokens 1,16,64,128 --budget 1.5 --no-energy \
        --impl eager,compile,liger,fused ;;
    activation)
      sweep activation forward --shapes llama7b --scope activation --tokens 2k,8k --budget 4 --no-energy \
        --impl eager,compile,liger,unsloth,silu-mul ;;
    step-mlp)
      sweep step-mlp step --shapes llama7b --scope mlp --tokens 1k,2k,4k,8k --budget 4 --no-energy \
        --impl $peers,fused-mlp-recompute,fused-mlp-chunked ;;
    step-peers)
      sweep step-peers step --shapes llama7b --scope mlp --tokens 1k,2k,4k,8k --budget 4 --no-energy \
        --impl eager,compile,liger,fused-mlp-auto,quack ;;
    step-accumulate)
      sweep step-accumulate step --accumulate 4 --shapes llama7b --scope mlp --precision fp8-rowwise --tokens 1k --budget 6 \
        --baseline fused-mlp-auto --impl fused-mlp-auto,fused-fp8,fused-fp8-kept ;;
    step)
      sweep step step --shapes llama7b --tokens 128,1k,2k,4k,8k --budget 3 --no-energy \
        --impl eager,compile,compile-packed,liger,unsloth,fused-dw-torch,fused-auto,quack ;;
    step-llama3-8b)
      sweep step-llama3-8b step --shapes llama3-8b --scope glu,mlp --tokens 2k,4k,8k --budget 3 --no-energy --impl $peers ;;
    step-others)
      sweep step-others step --shapes $others --scope glu,mlp --tokens 4k --budget 2.5 --no-energy --impl $peers ;;
    energy)
      sweep energy step --shapes llama7b,llama3-8b --scope mlp --tokens 4k,8k --budget 2 --impl eager,compile,fused-mlp-auto ;;
    backward) sweep backward backward --shapes llama7b ;;
    memory) sweep memory memory --shapes llama7b --scope glu,mlp --tokens 1k,8k --skip-impl 'compile-m*' ;;
    memory-mlp)
      sweep memory-mlp memory --shapes llama7b --scope mlp --tokens 8k --impl $peers,fused-mlp-recompute,fused-mlp-chunked ;;
    experts)
      sweep experts forward --shapes qwen3-30b-a3b,mixtral-8x7b --tokens 8k --budget 5 --no-energy \
        --baseline grouped-compile --impl $experts ;;
    experts-qwen3)
      sweep experts-qwen3 forward --shapes qwen3-30b-a3b --tokens 8k --budget 4 --no-energy \
        --baseline grouped-compile --impl $experts ;;
    experts-others)
      sweep experts-others forward --shapes gpt-oss-20b,deepseek-v3-rank --tokens 8k --budget 4 --no-energy \
        --baseline grouped-compile --impl $experts ;;
    experts-fp8)
      sweep experts-fp8 forward --shapes qwen3-30b-a3b --precision bf16,fp8-rowwise --tokens 8k --budget 4 --no-energy \
        --baseline grouped-compile --impl grouped-compile,fused-experts,scaled-grouped,scaled-grouped-compile,fused-fp8-experts ;;
    experts-peers) # Liger's search takes minutes
      sweep experts-peers forward --shapes qwen3-30b-a3b --tokens 8k --budget 4 --no-energy --baseline grouped-compile \
        --impl grouped-compile,liger-experts,quack-experts,fused-experts ;;
    experts-quack)
      sweep experts-quack forward --shapes mixtral-8x7b,deepseek-v3-rank --tokens 8k --budget 3 --no-energy \
        --baseline grouped-compile --impl grouped-compile,quack-experts,fused-experts ;;
    experts-quack-step)
      sweep experts-quack-step step --shapes qwen3-30b-a3b,mixtral-8x7b,deepseek-v3-rank --tokens 8k --budget 3 --no-energy \
        --baseline grouped-compile --impl grouped-compile,quack-experts,fused-experts ;;
    experts-liger)
      sweep experts-liger forward --shapes mixtral-8x7b,deepseek-v3-rank --tokens 8k --budget 3 --no-energy \
        --baseline grouped-compile --impl grouped-compile,liger-experts,fused-experts ;;
    experts-liger-few)
      sweep experts-liger-few forward --shapes qwen3-30b-a3b --tokens 1,4,16,64 --budget 3 --no-energy \
        --baseline grouped-compile --impl grouped-compile,liger-experts,fused-experts ;;
    experts-liger-step)
      sweep experts-liger-step step --shapes qwen3-30b-a3b,mixtral-8x7b --tokens 8k --budget 3 --no-energy \
        --baseline grouped-compile --impl grouped-compile,liger-experts,fused-experts ;;
    experts-liger-step-deepseek)
      sweep experts-liger-step-deepseek step --shapes deepseek-v3-rank --tokens 8k --budget 3 --no-energy \
        --baseline grouped-compile --impl grouped-compile,liger-experts,fused-experts ;;
    experts-zipf)
      sweep experts-zipf forward --shapes qwen3-30b-a3b,mixtral-8x7b --routing zipf --tokens 8k --budget 8 --no-energy \
        --baseline grouped-compile --impl $experts ;;
    experts-few)
      sweep experts-few forward --shapes qwen3-30b-a3b --tokens 1,4,16,64,32k --budget 6 --no-energy --baseline grouped-compile \
        --impl $experts,batched,quack-experts ;;
    experts-few-zipf)
      sweep experts-few-zipf forward --shapes qwen3-30b-a3b --routing zipf --tokens 1,4,16,64,32k --budget 4 --no-energy \
        --baseline grouped-compile --impl $experts,batched ;;
    experts-few-layers)
      sweep experts-few-layers forward --shapes qwen3-30b-a3b --routing uniform,zipf --tokens 1,2,3,4,8,16,32,64 --layers 4 \
        --budget 2 --no-energy --baseline grouped-compile --impl grouped,grouped-compile,batched,fused-experts ;;
    experts-few-layers-others)
      sweep experts-few-layers-others forward --shapes mixtral-8x7b,gpt-oss-20b,deepseek-v3-rank --routing uniform,zipf \
        --tokens 1,4,16,64 --layers 4 --budget 2 --no-energy --baseline grouped-compile --impl grouped-compile,fused-experts ;;
    experts-step)
      sweep experts-step step --shapes mixtral-8x7b,qwen3-30b-a3b,gpt-oss-20b --tokens 8k --budget 6.5 --no-energy \
        --baseline grouped-compile --impl $experts ;;
    experts-step-zipf)
      sweep experts-step-zipf step --shapes qwen3-30b-a3b,mixtral-8x7b,gpt-oss-20b --routing zipf --tokens 8k --budget 4 --no-energy \
        --baseline grouped-compile --impl grouped-compile,fused-experts ;;
    experts-step-deepseek)
      sweep experts-step-deepseek step --shapes deepseek-v3-rank --tokens 8k --budget 6.5 --no-energy --baseline grouped-compile \
        --impl $experts ;;
    experts-step-zipf-deepseek)
      sweep experts-step-zipf-deepseek step --shapes deepseek-v3-rank --routing zipf --tokens 8k --budget 6.5 --no-energy \
        --baseline grouped-compile --impl grouped-compile,fused-experts ;;
    experts-eager) # the loop over experts
      sweep experts-eager forward --shapes qwen3-30b-a3b,mixtral-8x7b,gpt-oss-20b,deepseek-v3-rank --tokens 8k --budget 2 \
        --no-energy --baseline grouped-compile --impl eager,grouped-compile,fused-experts ;;
    experts-eager-few)
      sweep experts-eager-few forward --shapes qwen3-30b-a3b --tokens 1,4,16,64 --budget 2 --no-energy \
        --baseline grouped-compile --impl eager,grouped-compile,fused-experts ;;
    experts-eager-step)
      sweep experts-eager-step step --shapes qwen3-30b-a3b,mixtral-8x7b --tokens 8k --budget 2 \
        --no-energy --baseline grouped-compile --impl eager,grouped-compile,fused-experts ;;
    experts-eager-step-others)
      sweep experts-eager-step-others step --shapes gpt-oss-20b,deepseek-v3-rank --tokens 8k --budget 2 \
        --no-energy --baseline grouped-compile --impl eager,grouped-compile,fused-experts ;;
    experts-memory-peers)
      sweep experts-memory-peers memory --shapes qwen3-30b-a3b --tokens 8k \
        --impl eager,grouped-compile,liger-experts,quack-experts,fused-experts ;;
    experts-memory)
      sweep experts-memory memory --shapes qwen3-30b-a3b --routing uniform,zipf --tokens 8k --impl $experts ;;
    fp8)
      sweep fp8 forward --precision bf16,fp8-rowwise,fp8-blockwise --shapes llama7b,llama3-8b --tokens 1k,8k --budget 2 --no-energy \
        --impl $fp8 ;;
    fp8-blocks)
      sweep fp8-blocks forward --precision fp8-blockwise --shapes llama7b,llama3-8b --tokens 1k,8k --budget 2 --no-energy \
        --impl $fp8 ;;
    fp8-mlp)
      sweep fp8-mlp step --precision bf16,fp8-rowwise,fp8-blockwise --scope mlp --shapes llama7b --tokens 8k --budget 6 --no-energy \
        --impl $fp8 ;;
    fp8-mlp-blocks)
      sweep fp8-mlp-blocks step --precision fp8-blockwise --scope mlp --shapes llama7b --tokens 8k --budget 6 --no-energy \
        --impl $fp8 ;;
    fp8-mlp-rows)
      sweep fp8-mlp-rows step --precision bf16,fp8-rowwise --scope mlp --shapes llama7b --tokens 8k --budget 6 --no-energy \
        --impl $fp8 ;;
    train-llama) sweep train-llama train --task llama --steps 16 --seeds 2 --budget 24 ;;
    tp)
      for shape in llama7b llama3-70b; do
        sweep "tp/$shape" tp --gpus 2 --shapes $shape --tokens 1k,4k,16k --modes forward,step --budget 0.7 --timeout 90
      done ;;
    train-fp8)
      for recipe in rowwise blockwise; do
        sweep "train-fp8/$recipe" train --task llama --precision "fp8-$recipe" --steps 32 --seeds 3 --budget 8 \
          --impl eager,fused-mlp-auto,fused-fp8
      done ;;
    tp-experts)
      for case in qwen3-30b-a3b:8k,32k mixtral-8x7b:8k; do
        sweep "tp/${case%%:*}" tp --gpus 2 --shapes "${case%%:*}" --tokens "${case#*:}" --routing uniform,zipf --budget 1 \
          --timeout 90 --impl grouped-compile,megatron-alltoall,megatron-deepep,fused-experts
      done ;;
    verify) sweep verify verify ;;
    selftest) $bench selftest --false-alarms 0 >"$folder/selftest.txt" || [ $? -eq 1 ] ;;
    false-alarms)
      $bench selftest --no-zoo --false-alarms 200 --skip-impl '*compile*' >"$folder/selftest-false-alarms.txt" || [ $? -eq 1 ] ;;
    audit) $bench audit --impl eager,liger,fused-auto,fused-mlp-auto --out "$folder/audit" || [ $? -eq 1 ] ;;
    noise) $bench noise --out "$folder" >"$folder/noise.txt" || [ $? -eq 1 ] ;;
    random-forward)
      sweep random-forward forward --shapes random:40 --seed 1 --budget 1 --no-energy --impl eager,compile,liger,fused-auto ;;
    random-step)
      sweep random-step step --shapes random:40 --seed 1 --budget 1 --no-energy --impl eager,compile,liger,fused-auto ;;
    random-step-mlp)
      sweep random-step-mlp step --shapes random:40 --seed 1 --scope mlp --budget 1 --no-energy \
        --impl eager,compile,liger,fused-mlp-auto ;;
    step-ragged)
      sweep step-ragged step --shapes llama7b --tokens 300,1100,1536,2050,2304,4100 --budget 3 --no-energy --baseline compile \
        --impl eager,compile,liger,fused-auto,quack ;;
    kernels-by-triton) # of the one that is installed
      {
        python -c 'import triton; print("Triton", triton.__version__)'
        SWIGLU_KERNELS_BY_HAND=on python -m swiglu_kernels.standalone.odd_sizes --few | tail -n 1
      } >>"$folder/kernels-by-triton.txt" ;;
    patched-llama) python kernels/examples/train_llama.py --out "$folder/patched-llama" ;;
    sweep-over-gpus) # the same on one GPU and on all
      for gpus in 0 all; do
        { time sweep "sweep-over-gpus/$gpus" forward --gpus "$gpus" --tokens 1k,2k,4k,8k,16k --no-energy --budget 7 \
          --impl eager,eager-packed,fused --shapes "$widths"; } 2>>"$folder/sweep-over-gpus.txt"
      done ;;
    doctor) $bench doctor --clock >"$folder/doctor.txt" || [ $? -eq 1 ] ;;
    *)
      echo "There is no piece $piece; there are: $pieces" >&2
      exit 2
      ;;
  esac
done
