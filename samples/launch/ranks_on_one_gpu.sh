#!/usr/bin/env bash
# Several ranks on one GPU, over NCCL, to try the messages and collectives of a cluster without one:
#
#   samples/launch/ranks_on_one_gpu.sh 2 --mesh 1,2,1        # how many ranks, and the script's arguments
#   samples/launch/ranks_on_one_gpu.sh                       # seven meshes: do CUDA graphs leave the losses as they are?
#   samples/launch/ranks_on_one_gpu.sh --dtype bfloat16      # the same, with further arguments of samples.train
#
# NCCL refuses two ranks of one host on one device. With different host names they take each other for other hosts and
# talk over sockets: this shows that a mesh works, not how fast it is. Without a GPU they talk over gloo. On an H100 the
# losses of 1,2,1 and 2,1,1 and 1,1,2 were the same bits with graphs and without (27 November 2026).
#
# The text is made once, by python -m samples.corpus.
#
# MESHES has other meshes for the second form, LIMIT the seconds after which a run is ended: it is then a line that says
# so. The exit status is 0 if all losses are the same bits.
set -euo pipefail

export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket GLOO_SOCKET_IFNAME=lo
export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29500}"

run() {
    local ranks=$1 rank process status=0
    local -a processes=()
    shift
    for ((rank = 0; rank < ranks; rank++)); do
        RANK=$rank WORLD_SIZE=$ranks NCCL_HOSTID="host$rank" timeout -k 5 "${LIMIT:-0}" \
            "${PYTHON:-python}" -m "${SCRIPT:-samples.train}" "$@" &
        processes+=($!)
    done
    for process in "${processes[@]}"; do wait "$process" || status=$?; done
    return $status
}

if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    run "$@"
    exit
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export LIMIT="${LIMIT:-600}"
different=0
for mesh in ${MESHES:-1,1,1 2,1,1 1,2,1 1,1,2 2,2,1 1,2,2 2,2,2}; do
    chunks=1
    [[ $mesh == 2,2,* ]] && chunks=2 # interleaved
    for graphs in "" --no-graphs; do
        run $((${mesh//,/*})) --mesh "$mesh" --chunks $chunks --dropout 0.1 --steps 20 $graphs "$@" \
            --losses "$folder/losses$graphs" >"$folder/log" 2>&1 && continue
        tail -n 5 "$folder/log" >&2
        rm -f "$folder/losses$graphs"
    done
    "${PYTHON:-python}" - "$mesh" "$folder/losses" "$folder/losses--no-graphs" <<'END' || different=1
import json
import sys
from pathlib import Path

mesh, *files = sys.argv[1:]
losses = {}
for how, file in zip(("with graphs", "without"), map(Path, files)):
    if not file.exists():
        print(f"{mesh}: no losses {how}")
        sys.exit(1)
    losses[how] = [float(json.loads(line)["loss"]).hex() for line in file.read_text().splitlines()]
rows = list(zip(*losses.values(), strict=True))
differing = [step for step, (one, other) in enumerate(rows, 1) if one != other]
step = differing[0] if differing else len(rows)
verdict = f"DIFFERENT from step {step} on" if differing else f"the same bits in {step} steps, at last"
print(f"{mesh}: {verdict}", ", ".join(f"{own[step - 1]} {how}" for how, own in losses.items()), flush=True)
sys.exit(bool(differing))
END
    rm -f "$folder"/losses*
done
exit $different
