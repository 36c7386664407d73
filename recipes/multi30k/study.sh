#!/usr/bin/env bash
# Trains and scores variants of the recipe, several at a time, and prints the means over the seeds as a table:
#
#   recipes/multi30k/study.sh DATA OUT [VARIANTS]
#
# DATA holds the raw files that the README names. Each line of VARIANTS (study.txt) is a name, a number of pieces, and options of `mtkit train`.
# What is finished is not done again, and an interrupted training goes on where it was.
#
# What is made of one form of the text, with so many updates, lies in OUT/TEXT-STEPS/VARIANT/seed-N.
#
# Variables: TEXT (raw, or lc), see the README; SEEDS (1 2 3); JOBS, trainings at a time (1); STEPS, updates of each (those of the recipe); TRAIN_FLAGS, further options for all, for
# example '--device cuda'; MTKIT, PYTHON, and those of the Makefile.
set -eu

recipe=$(cd "$(dirname "$0")" && pwd)
data=${1:?usage: study.sh DATA OUT [VARIANTS]} out=${2:?usage: study.sh DATA OUT [VARIANTS]} variants=${3:-$recipe/study.txt}
SEEDS=${SEEDS:-1 2 3} JOBS=${JOBS:-1} MTKIT=${MTKIT:-mtkit} PYTHON=${PYTHON:-python3} TRAIN_FLAGS=${TRAIN_FLAGS-}
export TEXT=${TEXT:-raw}
[ "$TEXT" = lc ] && config=config-lc || config=config
STEPS=${STEPS:-$(sed -n 's/^max_steps = //p' "$recipe/$config.toml")}
mkdir -p "$out/$TEXT-$STEPS"
data=$(cd "$data" && pwd) out=$(cd "$out" && pwd) # make works in the directory of the recipe
runs=$out/$TEXT-$STEPS failures=$(mktemp)
trap 'rm -f "$failures"' EXIT

lines() { # the variants, without comments and blank lines
    sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$variants"
}

recipe_make() { # TARGET PIECES ...: the recipe's own steps; all variants with as many pieces share a tokenizer and shards
    local target=$1 pieces=$2
    shift 2
    make -s -C "$recipe" "$target" DATA="$data" OUT="$out/data-$pieces" TOKENIZER_FLAGS="--set vocab_size=$pieces" MTKIT="$MTKIT" PYTHON="$PYTHON" "$@"
}

for pieces in $(lines | awk '{ print $2 }' | sort -un); do recipe_make shards "$pieces"; done
while read -r name pieces flags; do
    for seed in $SEEDS; do
        while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
        # The last ten checkpoints are averaged: fifty of a run lie close enough together.
        recipe_make results "$pieces" RUN="$runs/$name/seed-$seed" SEED="$seed" \
            TRAIN_FLAGS="--set training.max_steps=$STEPS --set checkpoint.every_steps=$(((STEPS + 49) / 50)) $flags $TRAIN_FLAGS" \
            > "$runs/$name-$seed.log" 2>&1 < /dev/null || echo "$name, seed $seed: failed, see $runs/$name-$seed.log" | tee -a "$failures" >&2 &
    done
done < <(lines)
wait
PYTHONPATH="$recipe/../..${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m recipes.multi30k.study "$runs" $(lines | awk '{ print $1 }')
[ ! -s "$failures" ]
