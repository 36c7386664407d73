#!/usr/bin/env bash
# Everything worth knowing about mtkit on one GPU, in under eight minutes, as JSON files:
#
#   recipes/bench/device.sh DATA OUT
#
# DATA holds Multi30k as raw files (train.en, val.de, test_2016_flickr.en ...). OUT gets
#   tests.txt            what pytest said of the tests that need a GPU
#   train-PRESET.json    training speed on generated text with the lengths of WMT14
#   multi30k.json        a short Multi30k training: scores on the dev set, and how long it took
#   translate-*.json     decoding speed of the model trained there, with BLEU
# A step that fails does not stop the next; the exit code is the number of failed steps.
#
# Variables: MTKIT, PYTHON; DEVICE (cuda); PRESETS (tiny base big); UPDATES of each repeat (20); STEPS of the Multi30k training (2400).
set -u

data=${1:?usage: device.sh DATA OUT} out=${2:?usage: device.sh DATA OUT}
MTKIT=${MTKIT:-mtkit} PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} PRESETS=${PRESETS-tiny base big} UPDATES=${UPDATES:-20} STEPS=${STEPS:-2400}
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

bench_train() { # PRESET: more updates are not needed, as the spread of the repeats shows
    $MTKIT bench train --preset "$1" --device "$DEVICE" --mean-length 27 --updates "$UPDATES" --set batch.max_tokens=25000 --json > "$out/train-$1.json"
}

multi30k() {
    $MTKIT train --config "$recipe/config.toml" --train "$data/train.en" "$data/train.de" --dev "$data/val.en" "$data/val.de" --device "$DEVICE" \
        --output "$out/run" --set training.max_steps="$STEPS" --set validation.every_steps=none --set checkpoint.every_steps=$((STEPS / 12)) --quiet --json > "$out/multi30k.json" &&
        $MTKIT average "$out/run" --last 5 --output "$out/average" --quiet
}

bench_translate() { # BEAM_SIZE
    $MTKIT bench translate "$out/average" --src "$data/test_2016_flickr.en" --ref "$data/test_2016_flickr.de" --beam-size "$1" --batch-tokens 16384 \
        --device "$DEVICE" --json > "$out/translate-beam$1.json"
}

step "GPU tests" gpu_tests
for preset in $PRESETS; do step "bench train $preset" bench_train "$preset"; done
step "Multi30k training" multi30k
for beam in 4 1; do step "bench translate, beam $beam" bench_translate "$beam"; done
exit "$failed"
