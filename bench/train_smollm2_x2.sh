#!/bin/bash
# A real drafter and its ablations on two GPUs, unattended:
#   bench/train_smollm2_x2.sh WORKSPACE PROMPTS [extra...]
# Answers on both, then 360 s of training on one and three times 150 s on the other; whatever is trained is
# decoded on the first. `extra` are more runs of 150 s at the end, each as ce:objective=ce,kl_share=1.0 (NAME:CHANGES).
# About 13 minutes; WORKSPACE/done appears at the end, logs of all stages lie in WORKSPACE/log.
workspace=$1 prompts=$2
shift 2
mkdir -p "$workspace/log"
rm -f "$workspace/done"
cd "$(dirname "$0")/.." || exit 1
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
ANSWERING=${ANSWERING:-150} LOADING=20 LONG=${LONG:-360} SHORT=${SHORT:-150} SHARDS=${SHARDS:-32}
ends=$((SECONDS + ANSWERING))

say() { echo "=== $(date +%T) $*"; }

stage() { # NAME WORDS...: one stage of the bench, with a log of its own
    local name=$1
    shift
    say "$name: $*"
    python3 -m bench.train_smollm2 --workspace "$workspace" "$@" > "$workspace/log/$name.log" 2>&1
    local code=$?
    say "$name: exit $code; $(grep -v '^{' "$workspace/log/$name.log" | tail -1 | cut -c1-160)"
    return $code
}

trained() { # DEVICE NAME SECONDS CHANGES...: without evaluations of its own, which would cost it time
    local device=$1 name=$2 seconds=$3
    shift 3
    stage "train-$name" train "$name" --device "$device" --seconds "$seconds" --set held_out= "${objective[@]}" "$@"
    touch "$workspace/log/$name.trained"
}

scored() { # NAME: once it is trained
    while [ ! -e "$workspace/log/$1.trained" ]; do sleep 0.5; done
    stage "score-$1" score "$1" --device cuda:0 --shards "$SHARDS"
}

until_end() { # seconds of decoding until answers are to be there; it begins to count when the target is loaded
    local left=$((ends - SECONDS - LOADING))
    echo $((left > 20 ? left : 20))
}

objective=()
stage convert convert || exit 1
export TOKENIZERS_PARALLELISM=true
stage answer-1 answer --device cuda:1 --prompts "$prompts" --shard 1/2 --seconds "$(until_end)" &
if ! stage pace pace --device cuda:0; then
    tail -30 "$workspace/log/pace.log"
    objective=(--set objective=ce --set kl_share=1.0)
    stage pace pace --device cuda:0 "${objective[@]}"
fi
[ -e "$workspace/pace.json" ] || echo 0.064 > "$workspace/pace.json"
say "pace: $(cat "$workspace/pace.json") s a step"
stage answer-0 answer --device cuda:0 --prompts "$prompts" --shard 0/2 --seconds "$(until_end)"
wait
for share in 0 1; do
    grep -h "Decoding\|fit into\|tokens/s\|^all\|^tokens" "$workspace/log/answer-$share.log" | tail -5
done
stage merge merge || for share in 0 1; do # one of them alone is better than none
    if [ -e "$workspace/data-$share/held_out.arrow" ]; then cp -r "$workspace/data-$share" "$workspace/data"; break; fi
done

rm -f "$workspace"/log/*.trained
(
    trained cuda:1 again "$SHORT"
    trained cuda:1 uniform "$SHORT" --set anchor_choice=uniform
    trained cuda:1 taps3 "$SHORT" --set taps=3
) &
trained cuda:0 main "$LONG"
for name in main again uniform taps3; do scored "$name"; done
for each in "$@"; do
    changes=()
    IFS=, read -ra named <<< "${each#*:}"
    for change in "${named[@]}"; do changes+=(--set "$change"); done
    trained cuda:0 "${each%%:*}" "$SHORT" "${changes[@]}"
    scored "${each%%:*}"
done
wait
stage table table
cat "$workspace/log/table.log"
touch "$workspace/done"
