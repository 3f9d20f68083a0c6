#!/usr/bin/env bash
# One part of the GPU runs, each with its own time bound; what it leaves goes to $OUT/PART.tar.gz whatever happens.
# usage: run.sh setup | production | speculation | long1m | compare | faults-worker | faults-parent | compiled
# VL=folder that holds c1 … c5, SITE=where vLLM is installed, DSPARK_GPU=folder of the runs; see README.md.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd); root=$(dirname "$(dirname "$here")"); cd "$root" || exit
part=${1:?usage: run.sh PART}
VL=${VL:-/tmp/vl}; SITE=${SITE:-/tmp/site}; PYTHON=${PYTHON:-python3}; OUT=${OUT:-/tmp/dspark-gpu-out}
export DSPARK_GPU=${DSPARK_GPU:-/tmp/dspark-gpu} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONUNBUFFERED=1
# $VL/tools: pytest and its plugins in versions of our own, where `setup` found them beside the parts.
export PYTHONPATH="$root:$VL/tools${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" "$DSPARK_GPU"; begin=$SECONDS; log=$DSPARK_GPU/$part.log
unset CC CXX
# Plugins by name: what else is installed there neither loads nor warns.
pytest=("$PYTHON" -m pytest -p xdist -p timeout -p no:cacheprovider)
ended() {
  code=$?
  [ "$part" = compare ] || leftovers
  echo "== $part ended with $code after $((SECONDS - begin)) s"
  [ -d "$DSPARK_GPU" ] && tar -C "$DSPARK_GPU" --exclude=hosts --exclude=bundle -czf "$OUT/$part.tar.gz" . && ls -l "$OUT/$part.tar.gz"
}
leftovers() {  # what a part that was killed left up is named and stopped, run by run
  local dspark=("$PYTHON" -m pytest_dspark.cli) where=(--cluster "$DSPARK_GPU/cluster.toml" --out "$DSPARK_GPU/evidence/after")
  [ -f "$DSPARK_GPU/cluster.toml" ] || return
  "${dspark[@]}" ps "${where[@]}" | tee "$DSPARK_GPU/$part.left"
  for id in $(sed -n 's/.*: run \([^ ]*\) rank .*/\1/p' "$DSPARK_GPU/$part.left" | sort -u); do
    "${dspark[@]}" stop "${where[@]}" --run "$id"
  done
}
trap ended EXIT
# INT first: an orderly stop of the ranks; then a minute; then KILL. CALL_ENDS (seconds since 1970) shortens every bound.
run() {
  local limit=$1 left; shift
  left=$((${CALL_ENDS:-9999999999} - $(date +%s) - 75))
  [ "$left" -lt "$limit" ] && limit=$left
  [ "$limit" -ge 45 ] || { echo "run.sh: $part: no time left, not run"; return 3; }
  timeout -s INT -k 60 "$limit" "$@" 2>&1 | tee "$log"
}
case $part in
setup)
  # Compiled once here, or each of twelve processes compiles for itself.
  run 140 bash -c "set -e; bash $VL/c5/unpack.sh
    [ ! -d $VL/c5/py ] || $PYTHON -m pip install -q --no-index --no-deps --no-compile --target $VL/tools $VL/c5/py/*.whl
    $PYTHON -m compileall -q -j 0 $SITE >/dev/null || true
    $PYTHON $here/machine.py --site $SITE --model $VL/model --out $DSPARK_GPU" ;;
production)
  run 430 "${pytest[@]}" -p pytest_dspark.plugin suites -m production --dspark-cluster "$DSPARK_GPU/cluster.toml" \
    --dspark-out "$DSPARK_GPU/evidence/production" ;;
speculation)
  run 430 "${pytest[@]}" -p pytest_dspark.plugin suites -m production --dspark-profile gpu-smollm2-ngram \
    --dspark-cluster "$DSPARK_GPU/cluster.toml" --dspark-out "$DSPARK_GPU/evidence/speculation" ;;
long1m)
  run 330 "${pytest[@]}" -p pytest_dspark.plugin suites -m long1m --dspark-cluster "$DSPARK_GPU/cluster.toml" \
    --dspark-out "$DSPARK_GPU/evidence/long1m" ;;
compare)
  # The recipe and the evidence root of faults-worker, which takes this engine over.
  run 330 bash -c "${pytest[*]} -p pytest_dspark.plugin suites -m production -k launch --dspark-keep \
    --dspark-cluster $DSPARK_GPU/cluster.toml --dspark-recipe $DSPARK_GPU/recipe/vllm-process.toml \
    --dspark-out $DSPARK_GPU/evidence/kept; \
    $PYTHON $here/compare.py --url http://127.0.0.1:8888 --model smollm2 --tokenizer $VL/model \
    --python 'env PYTHONPATH=$SITE HF_HUB_OFFLINE=1 $PYTHON' --out $DSPARK_GPU/compare.json --budget-s ${BUDGET_S:-150}" ;;
faults-worker) run 330 "${pytest[@]}" -s "$here/test_gpu_faults.py" -k worker ;;
faults-parent) run 330 "${pytest[@]}" -s "$here/test_gpu_faults.py" -k parent ;;
compiled) run 330 "${pytest[@]}" -s "$here/test_gpu_faults.py" -k compilation ;;
*) echo "run.sh: unknown part $part"; exit 2 ;;
esac
