# Sourced by the other scripts: SGLang on a machine without a GPU, reachable from this machine only.
# SGLANG_VENV: its virtual environment. MODEL: the model's folder. TP: tensor-parallel size. CORES: one core list per rank.
root=$(cd "$(dirname "$0")/../.." && pwd)
: "${SGLANG_VENV:=$root/.venv-sglang}" "${MODEL:=$root/.venv-sglang/tiny-llama}" "${TP:=1}"
if [ -z "${CORES:-}" ]; then
    CORES=0 rank=1
    while [ "$rank" -lt "$TP" ]; do CORES="$CORES|$((rank % $(nproc)))" rank=$((rank + 1)); done
fi
export SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="$CORES" OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
export SGLANG_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES=
# with a CUDA build of torch, tensor parallelism must not look for NCCL here
export SGLANG_NCCL_SO_PATH=/nonexistent

serve() { # serve PORT ARGUMENTS…: becomes the server; an idle one sleeps instead of keeping a core busy
    port=$1 && shift
    exec "$SGLANG_VENV/bin/python" -m sglang.launch_server --model-path "$MODEL" --host 127.0.0.1 --port "$port" \
        --tp-size "$TP" --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 \
        --mem-fraction-static 0.3 --max-total-tokens 4096 --disable-overlap-schedule --skip-server-warmup \
        --sleep-on-idle "$@"
}
