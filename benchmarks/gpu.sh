#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu.sh MODEL OUT PHASE...: runs the measurements of docs/MEASUREMENTS.md, and checks. Sizes are for the shapes of Qwen3-4B
# on one GPU of 139 GiB, with 126 GiB of host memory. The exit status is 1 if a phase failed.
#
# Environment variables (defaults in parentheses):
#   REPEAT        rounds of each case (5)
#   WINDOW        seconds of each measurement under sustained load (20)
#   SECONDS_EACH  timeout of each phase with engines, in seconds (600)
#   SETUPS        setups that replace those of a phase of sustained load
#   BEFORE        another checkout, for the last three phases
#   DMI_COMMIT, DMI_BEFORE  commits of both checkouts, if the code is not in a git repository
#   DMI_TURNS     a lock file. Several gpu.sh with the same file start their engines together, and measure in turn
#   GPUS          number of GPUs for the phases on several GPUs (2)
#
# Phases run in the given order. Each writes OUT/PHASE.json and OUT/PHASE.log:
#   kernels  taps in CUDA graphs, without vLLM (half a minute)
#   check, check-batches, check-reduced, check-whole   tokens and values with CUDA graphs: all hooks and principal
#            components, several layers in one op, reduced hooks, FULL graphs (2 minutes each)
#   main     stock, hidden-states and vllm-full, with copies to the host and with stores (8 minutes)
#   reduced  int8 and mixed (6 minutes)
#   curves   hooks and layers, seven engines at once (5 minutes)
#   slow     policies block and drop with a slow sink (4 minutes)
#   ehs      vLLM's own extraction (4 minutes)
#   sustained   sustained load: hidden-states of both owners, a narrow selection (7 minutes)
#   sustained-full, sustained-int8, sustained-long   sustained load: vllm-full; int8; prompts of 4,000 tokens, cached
#               prompts and 256 in flight, also with writers that always compress
#   sustained-pieces   sustained load: vLLM's default graphs
#   slices-ngram, slices-pool, slices-probes   sustained load, in slices of a second: n-gram drafts; 256 in flight with a pool;
#               probes (4 to 6 minutes each)
#   slices-hybrids, slices-decode   the same with shapes of two hybrid models; with long answers (4 to 6 minutes per model)
# Phases on several GPUs. The package must be installed, because workers find it by its entry point:
#   sustained-ranks   sustained load, tensor parallel on GPUs of 139 GiB (9 minutes)
#   sustained-32b, sustained-70b   the same with the shapes of a 32B or 70B model (benchmarks.shapes; 5 minutes)
#   bursts-ranks      bursts, tensor parallel (5 minutes)
#   check-ranks       tokens and values, tensor parallel (5 minutes)
#   data-parallel     servers with one and with several engines (ENGINES, as in 2,4), one store directory (5 minutes)
#   sustained-235b    the same with 8 layers of a model of 235B with experts, expert parallel (5 minutes)
#   bulk-ranks        `dmi run` over all GPUs (3 minutes)
#   experts-ranks     expert parallel: chosen experts in stores and from vLLM (4 minutes)
# On one GPU:
#   models   decode of hidden-states with shapes of five families (benchmarks.shapes), or those that MODELS names, on one
#            GPU of 80 GB or more (15 minutes)
#   check-models   tokens and values of small models of these families, or those that ARCHS names (15 minutes)
#   starts   start time of engines, with and without a warm compile cache
#   before-hidden, before-full   hidden-states and vllm-full, with this checkout and with BEFORE (4 minutes each)
#   before-prefill               prefill with both selections, 40 rounds (5 minutes)
set -euo pipefail
status=0
failed() { echo "$1 ended with status $2"; status=1; }
model=${1:?usage: gpu.sh MODEL OUT PHASE...} out=${2:?usage: gpu.sh MODEL OUT PHASE...}
shift 2
mkdir -p "$out"
sizes='"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]'
engine="{\"gpu_memory_utilization\": 0.03, \"max_num_seqs\": 256, \"compilation_config\": {$sizes}}"
steps='"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512]'
whole="{\"gpu_memory_utilization\": 0.03, \"max_num_seqs\": 256, \"compilation_config\": {\"cudagraph_mode\": \"FULL\", $steps}}"
small='{"max_num_batched_tokens": 320, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 8000000000}'
decode=decode1,decode32,decode128
ranks=${GPUS:-2}
small_ring='{"host_buffer_bytes": 8589934592}'
roomy='{"host_buffer_bytes": 17179869184, "staging_bytes": 4294967296}'

capture() {  # NAME GB-OF-CACHES SETUPS CASES MORE...
  local name=$1 caches=$2 setups=$3 cases=$4
  shift 4
  timeout "${SECONDS_EACH:-600}" python3 -m benchmarks.capture --model "$model" --out "$out/$name.json" \
    --store-dir "/dev/shm/dmi-$name" --together ${PIN---pin} --owner target --repeat "${REPEAT:-5}" --limit-seconds 0 \
    --options '{"host_buffer_bytes": 17179869184}' --engine-args "$engine" --kv-gigabytes "$caches" --only "$setups" \
    --cases "$cases" "$@" >"$out/$name.log" 2>&1 || failed "$name" $?
  rm -rf "/dev/shm/dmi-$name"
}

busy() {  # NAME GB-OF-CACHES SETUPS LOADS MORE...
  local name=$1 caches=$2 setups=${SETUPS:-$3} loads=$4
  shift 4
  timeout "${SECONDS_EACH:-600}" python3 -m benchmarks.sustained --model "$model" --out "$out/$name.json" \
    --store-dir "/dev/shm/dmi-$name" --engine-args "$whole" --kv-gigabytes "$caches" --setups "$setups" --loads "$loads" \
    --seconds "${WINDOW:-20}" "$@" >"$out/$name.log" 2>&1 || failed "$name" $?
  rm -rf "/dev/shm/dmi-$name" "/dev/shm/dmi-$name"-kept
}

check() {  # NAME OWNERS MORE...
  local name=$1 owners=$2
  shift 2
  ${DMI_TURNS:+flock -s "$DMI_TURNS"} python3 -m benchmarks.checks.check_gpu --out "$out/$name.json" \
    --store-dir "/dev/shm/dmi-$name" --model "/tmp/dmi-$name" --owners "$owners" --engine-args "$small" "$@" >"$out/$name.log" 2>&1 || failed "$name" $?
  rm -rf "/dev/shm/dmi-$name"
}

for phase in "$@"; do
  case $phase in
    kernels)
      python3 -m benchmarks.kernels --out "$out/kernels.json" >"$out/kernels.log" 2>&1 || failed kernels $? ;;
    check) check check target,pca ;;
    check-batches) check check-batches target --hooks resid_pre,resid_mid,q,k ;;
    check-reduced) check check-reduced reduced ;;
    check-whole) check check-whole draft,target --head-dim 128 ;;
    main)
      capture main '{"stock": 5, "full": 72, "hidden": 9}' \
        'stock,hidden-states null,full null,full host,hidden-states disk,full disk none,full disk zstd,full disk lz4' \
        "$decode,prefill32,prefill32x4" --options "$roomy" --limit-seconds 0.2 --profile 'stock,hidden-states null,full null' ;;
    reduced)
      capture reduced '{"stock": 5, "int8": 36, "mixed": 28}' 'stock,int8 null,mixed null,int8 disk none,mixed disk none' \
        decode32,decode128,prefill32 --options "$roomy" --profile 'int8 null,mixed null' ;;
    curves)
      capture curves '{"stock": 3, "hooks-1": 4, "hooks-2": 6, "hooks-3": 11, "layers-quarter": 7, "layers-half": 11, "full": 19}' \
        'stock,full null,hooks-1,hooks-2,hooks-3,layers-quarter,layers-half' decode32,prefill8 --curves hooks,layers --profile '' ;;
    slow)
      capture slow '{"stock": 5, "full": 36}' 'stock,full null,full disk slow block,full disk slow drop' decode32,prefill8 \
        --profile '' ;;
    ehs)
      capture ehs '{"stock": 5, "ehs": 20, "hidden": 9}' 'stock,ehs,hidden-states disk' "$decode,prefill32" --profile '' ;;
    sustained)
      busy sustained '{"stock": 13, "hidden-states zstd": 36, "hidden-states zstd draft": 9, "narrow zstd": 7}' \
        'stock,hidden-states zstd,hidden-states zstd draft,narrow zstd' short64,short256 \
        --loads-of '{"narrow zstd": "short64", "hidden-states zstd draft": "short64"}' --repeat 2 --profile 3 ;;
    sustained-full)
      busy sustained-full '{"stock": 5, "full null": 72}' 'stock,full null' short64 --repeat 2 --profile 1 ;;
    sustained-int8)
      busy sustained-int8 '{"stock": 5, "int8 null": 42, "int8 lz4": 42}' 'stock,int8 null,int8 lz4' short64 --profile 1 ;;
    sustained-long)
      busy sustained-long '{"stock": 13, "*": 36}' 'stock,hidden-states zstd,hidden-states zstd:always' \
        long16,cached64,short256 --loads-of '{"hidden-states zstd:always": "long16,cached64"}' --repeat 2 \
        --options-of '{"hidden-states zstd:always": {"always_compress": true}}' ;;
    sustained-ranks)
      whole="{\"tensor_parallel_size\": $ranks, ${whole#\{}" VLLM_ALLREDUCE_USE_SYMM_MEM=0 \
        busy sustained-ranks '{"stock": 4, "full null": 36, "int8 null": 20, "attn null": 4, "*": 9}' \
        'stock,hidden-states null,hidden-states zstd,hidden-states zstd draft,full null,int8 null,attn null' short64 \
        --repeat 2 --profile 2 --options "$small_ring" ;;
    sustained-32b | sustained-70b | sustained-235b)
      name=qwen3-32b caches='{"stock": 5, "hidden-states zstd": 26}' parallel="\"tensor_parallel_size\": $ranks"
      [ "$phase" != sustained-70b ] || name=llama3-70b caches='{"stock": 4, "hidden-states zstd": 34}'
      [ "$phase" != sustained-235b ] || name=qwen3-235b caches='{"*": 9}' parallel="$parallel, \"enable_expert_parallel\": true"
      python3 -m benchmarks.shapes /tmp/dmi-shapes --only "$name" >/dev/null
      model=/tmp/dmi-shapes/$name whole="{$parallel, ${whole#\{}" VLLM_ALLREDUCE_USE_SYMM_MEM=0 \
        busy "$phase" "$caches" 'stock,hidden-states zstd' short64 --repeat 2 --profile 2 --options "$small_ring" ;;
    bursts-ranks)
      engine="{\"tensor_parallel_size\": $ranks, ${engine#\{}" PIN='' VLLM_ALLREDUCE_USE_SYMM_MEM=0 \
        capture bursts-ranks '{"stock": 5, "hidden": 9}' 'stock,hidden-states null,hidden-states disk' \
        decode32,decode128,prefill32 --options "$small_ring" --profile '' ;;
    check-ranks)
      few=${small/8000000000/3000000000}
      small="{\"tensor_parallel_size\": $ranks, ${few#\{}" VLLM_ALLREDUCE_USE_SYMM_MEM=0 \
        check check-ranks target,draft --heads 8 --head-dim 128 ;;
    data-parallel)
      timeout "${SECONDS_EACH:-600}" python3 -m benchmarks.data_parallel --model "$model" --out "$out/data-parallel.json" \
        --store-dir /dev/shm/dmi-data-parallel --kv-gigabytes '{"stock": 5, "capture": 11}' --seconds "${WINDOW:-20}" --options "$small_ring" \
        --engine-args "${whole%\}}, \"max_model_len\": 1024, \"load_format\": \"dummy\", \"skip_tokenizer_init\": true}" \
        --engines "${ENGINES:-$ranks}" >"$out/data-parallel.log" 2>&1 || failed data-parallel $?
      rm -rf /dev/shm/dmi-data-parallel ;;
    bulk-ranks)
      timeout "${SECONDS_EACH:-600}" python3 -m benchmarks.bulk --model "$model" --out "$out/bulk-ranks.json" \
        --store-dir /dev/shm/dmi-bulk-ranks --engines "$ranks" --owner target --rounds 2 --requests 4000 \
        --prompt-tokens 128 --max-tokens 64 --engine-args \
        "${whole%\}}, \"max_model_len\": 1024, \"load_format\": \"dummy\", \"skip_tokenizer_init\": true, \"kv_cache_memory_bytes\": 16000000000}" \
        >"$out/bulk-ranks.log" 2>&1 || failed bulk-ranks $?
      rm -rf /dev/shm/dmi-bulk-ranks ;;
    experts-ranks)
      # Data-parallel experts need vLLM's own binding of NCCL. On some machines it needs this path; on others it always fails.
      nccl=$(python3 -c 'import glob, sys; print(*[f for p in sys.path for f in glob.glob(p + "/nvidia/nccl/lib/libnccl.so.2")][:1])')
      for kind in tensor data; do
        VLLM_NCCL_SO_PATH=${VLLM_NCCL_SO_PATH:-$nccl} python3 -m benchmarks.checks.check_experts --out "$out/experts-$kind.json" \
          --store-dir "/dev/shm/dmi-experts-$kind" --model "/tmp/dmi-experts-$kind" --owners target --engine-args \
          "{\"${kind}_parallel_size\": $ranks, \"gpu_memory_utilization\": 0.03, \"kv_cache_memory_bytes\": 3000000000}" \
          >"$out/experts-$kind.log" 2>&1 || failed "experts-$kind" $?
        rm -rf "/dev/shm/dmi-experts-$kind"
      done ;;
    sustained-pieces)
      busy sustained-pieces '{"stock pieces": 4, "full null pieces": 66, "*": 9}' \
        'stock pieces,hidden-states zstd pieces,hidden-states zstd draft pieces,full null pieces' short64 ;;
    slices-ngram)
      busy slices-ngram '{"stock ngram": 10, "*": 17}' 'stock ngram,hidden-states host ngram,hidden-states zstd ngram' mixed64 \
        --slice 1 --warm 4 --options "$small_ring" ;;
    slices-pool)
      busy slices-pool '{"*": 20}' 'stock,hidden-states zstd pool' mixed256 --pool-gigabytes '{"*": 14}' --slice 1 --warm 4 \
        --options "$small_ring" ;;
    slices-probes)
      busy slices-probes '{"stock": 7, "probe keep": 18, "*": 7}' 'stock,probe one,probe layers,probe latents,probe keep' \
        mixed64 --slice 1 --warm 4 --options "$small_ring" ;;
    slices-hybrids | slices-decode)
      load=mixed64
      [ "$phase" != slices-decode ] || load=decode64
      for name in qwen3.5-4b nemotron-h; do
        python3 -m benchmarks.shapes /tmp/dmi-shapes --only "$name" >/dev/null
        few="{\"gpu_memory_utilization\": 0.03, \"max_num_seqs\": 128, \"compilation_config\": {$steps}}"
        [ "$name" != qwen3.5-4b ] || few="{\"gdn_prefill_backend\": \"triton\", ${few#\{}"
        model=/tmp/dmi-shapes/$name whole="$few" busy "$phase-$name" '{"*": 9}' \
          'stock,hidden-states null pool,hidden-states zstd pool' "$load" --pool-gigabytes '{"*": 9.5}' --slice 1 --warm 4 \
          --options "$small_ring"
      done ;;
    models)
      python3 -m benchmarks.shapes /tmp/dmi-shapes >/dev/null
      few='{"gpu_memory_utilization": 0.03, "max_num_seqs": 64, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}'
      for name in ${MODELS:-gemma3 gpt-oss pythia qwen3-moe deepseek-v2}; do
        model="/tmp/dmi-shapes/$name" engine="$few" REPEAT=${REPEAT:-7} capture "models-$name" '{"stock": 4, "hidden": 5}' \
          'stock,hidden-states null,hidden-states disk' decode32 --profile ''
      done ;;
    check-models)
      for arch in ${ARCHS:-gemma3_text gpt_oss gpt_neox qwen3_moe deepseek_v2}; do
        check "check-$arch" stock2,target,draft --arch "$arch"
      done ;;
    starts)
      busy starts '{"*": 9}' 'stock,hidden-states zstd,full null' short64 --starts 2 ;;
    before-hidden)
      capture before-hidden '{"stock": 5, "hidden": 9}' 'stock,hidden-states null,hidden-states disk' "$decode,prefill32" \
        --profile '' --before "${BEFORE:?BEFORE=DIR names another checkout}" ;;
    before-full)
      capture before-full '{"stock": 5, "full": 48}' 'stock,full null,full disk none' decode1,decode32,prefill32 \
        --profile '' --before "${BEFORE:?BEFORE=DIR names another checkout}" ;;
    before-prefill)
      REPEAT=${REPEAT:-40} capture before-prefill '{"stock": 5, "full": 24, "hidden": 6}' \
        'stock,hidden-states null,hidden-states disk,full null' prefill32 --profile '' \
        --before "${BEFORE:?BEFORE=DIR names another checkout}" ;;
    *)
      echo "gpu.sh: no phase $phase" >&2
      exit 2 ;;
  esac
done
exit $status
