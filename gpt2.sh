#!/usr/bin/env bash
# From nothing to a chat with your own GPT-2 124M. One H100: 5.2 hours and $13; eight: 0.65 to 0.8 hours and $13 to $16, by
# arithmetic from 50 measured steps. Nobody has run it to the end yet. Every step resumes: repeat the command after any stop.
#
#   bash gpt2.sh                         # flags go to train_gpt2.py, as in: bash gpt2.sh --checkpoint_interval 200
#   RECIPE=tiny DATA=input.txt ROWS=questions.json HELLASWAG= bash gpt2.sh    # in small: minutes on a CPU, offline
set -euo pipefail
cd "$(dirname "$0")"

RECIPE=${RECIPE-gpt2}                               # gpt2, gpt2-medium, speedrun, ... (train_gpt2.py)
DATA=${DATA-edu_fineweb10B}                         # a folder for the token shards, or your own .txt
OUT=${OUT-out/$RECIPE}
GPUS=${GPUS-$( (nvidia-smi -L 2>/dev/null || true) | wc -l)}   # of this machine
ROWS=${ROWS-tatsu-lab/alpaca}                       # instructions to finetune on: a file, or a data set of the hub
HELLASWAG=${HELLASWAG-hub}                          # hub, a .jsonl, or nothing to skip it

if [ -z "${VIRTUAL_ENV-}" ]; then
    [ -d .venv ] || python3 -m venv .venv
    source .venv/bin/activate
    pip install --quiet -r requirements.txt
fi
[[ $DATA == *.txt ]] || python fineweb.py --out_dir "$DATA"
start=(python)
[ "$GPUS" -le 1 ] || start=(torchrun --standalone --nproc_per_node="$GPUS" --max-restarts=3)
"${start[@]}" train_gpt2.py "$RECIPE" --data "$DATA" --out_dir "$OUT" --resume "$@"
case $HELLASWAG in
    "") ;;
    hub) python hellaswag.py "$OUT" ;;
    *) python hellaswag.py "$OUT" --data "$HELLASWAG" ;;
esac
python lora_finetune.py --base "$OUT" --data "$ROWS" --out_dir "$OUT-chat" --resume
python sample.py "$OUT" --adapter "$OUT-chat/adapter" --chat
