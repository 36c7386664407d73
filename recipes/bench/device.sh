#!/usr/bin/env bash
# Everything worth knowing about mtkit on one GPU, in under eight minutes, as JSON files:
#
#   recipes/bench/device.sh DATA OUT
#
# DATA holds Multi30k as raw files (train.en, val.de, test_2016_flickr.en ...). OUT gets
#   tests.txt            what pytest said of the tests that need a GPU
#   train-PRESET.json    training speed on generated text: base and big with the lengths of WMT14, tiny with those of Multi30k
#   train-PRESET-uncompiled.json   the same with layers as they are written, to see what torch.compile gives
#   multi30k.json        the Multi30k recipe: scores on the dev set, and how long it took
#   scores.json          BLEU of its average on test2016
#   translate-*.json     decoding speed of the model trained there, with BLEU
#   search-*.json        decoding speed of base with random weights: beam 4, greedy, and one sentence at a time
# The last two once for each engine of mtkit: in batches, and in slots (recorded as CUDA graphs).
# A step that fails does not stop the next; the exit code is the number of failed steps.
#
# Variables: MTKIT, PYTHON; DEVICE (cuda); PRESETS (base big tiny); UPDATES of each repeat (20); STEPS of the Multi30k training (that of the recipe);
# SEARCH_PRESET (base) and SENTENCES (2048) of the searches with random weights.
set -u

data=${1:?usage: device.sh DATA OUT} out=${2:?usage: device.sh DATA OUT}
MTKIT=${MTKIT:-mtkit} PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} PRESETS=${PRESETS-base big tiny} UPDATES=${UPDATES:-20}
SEARCH_PRESET=${SEARCH_PRESET:-base} SENTENCES=${SENTENCES:-2048}
STEPS=${STEPS:-$(sed -n 's/^max_steps = //p' "$(dirname "$0")/../multi30k/config.toml")}
recipe=$(cd "$(dirname "$0")/../multi30k" && pwd)
root=$(cd "$recipe/../.." && pwd)
mkdir -p "$out"
failed=0

step() { # NAME COMMAND...: run it, say how long it took, count a failure
    local name=$1 started=$SECONDS
    shift
    if "$@"; then echo "$name: $((SECONDS - started)) s" >&2; else echo "$name: FAILED after $((SECONDS - started)) s" >&2 && failed=$((failed + 1)); fi
}

gpu_tests() { "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml" "$root/tests" > "$out/tests.txt" 2>&1; }

bench_train() { # PRESET COMPILE NAME
    local shape="--mean-length 27 --set batch.max_tokens=25000"
    [ "$1" != tiny ] || shape="--mean-length 15"
    # shellcheck disable=SC2086  # the options are words
    $MTKIT bench train --preset "$1" --device "$DEVICE" $shape --updates "$UPDATES" --set training.compile_layers="$2" --json > "$out/train-$3.json"
}

multi30k() {
    $MTKIT train --config "$recipe/config.toml" --train "$data/train.en" "$data/train.de" --dev "$data/val.en" "$data/val.de" --device "$DEVICE" \
        --output "$out/run" --set training.max_steps="$STEPS" --set validation.every_steps=none --set checkpoint.every_steps=$((STEPS / 20)) \
        --set training.compile_layers=false --quiet --json > "$out/multi30k.json" &&
        $MTKIT average "$out/run" --last 10 --output "$out/average" --quiet &&
        $MTKIT translate "$out/average" --beam-size 5 --device "$DEVICE" --quiet < "$data/test_2016_flickr.en" > "$out/test_2016_flickr.hyp.de" &&
        $MTKIT score "$out/test_2016_flickr.hyp.de" --ref "$data/test_2016_flickr.de" --json > "$out/scores.json"
}

bench_translate() { # BEAM_SIZE ENGINE
    $MTKIT bench translate "$out/average" --src "$data/test_2016_flickr.en" --ref "$data/test_2016_flickr.de" --beam-size "$1" --engine "$2" \
        --batch-tokens 16384 --device "$DEVICE" --json > "$out/translate-beam$1-$2.json"
}

bench_search() { # NAME BEAM_SIZE SENTENCES TOGETHER ENGINE
    $MTKIT bench search --preset "$SEARCH_PRESET" --beam-size "$2" --sentences "$3" --batch-sentences "$4" --engine "$5" --device "$DEVICE" \
        --json > "$out/search-$1-$5.json"
}

step "GPU tests" gpu_tests
for preset in $PRESETS; do
    step "bench train $preset" bench_train "$preset" true "$preset"
    step "bench train $preset, uncompiled" bench_train "$preset" false "$preset-uncompiled"
done
step "Multi30k training" multi30k
for engine in mtkit slots; do
    step "bench search, beam 4, $engine" bench_search beam4 4 "$SENTENCES" 512 $engine
    step "bench search, greedy, $engine" bench_search greedy 1 "$SENTENCES" 512 $engine
    step "bench search, one at a time, $engine" bench_search single 4 8 1 $engine
    for beam in 4 1; do step "bench translate, beam $beam, $engine" bench_translate $beam $engine; done
done
exit "$failed"
