#!/usr/bin/env bash
# NVIDIA's aiperf against a running server: bench/external/aiperf.sh URL MODEL TOKENIZER [MORE ARGUMENTS]
#
#   octavo serve smollm2-135m &
#   bench/external/aiperf.sh http://127.0.0.1:8000 smollm2-135m ~/.cache/octavo/gguf/*/
#
# MODEL is a name that the server serves, TOKENIZER a folder with the model's tokenizer files. aiperf goes into an environment of its own,
# bench/external/.venv-aiperf (or $VENV). The report is printed, and lies as JSON and CSV in the folder named at the end.
set -euo pipefail
[ $# -ge 3 ] || { sed -n 's/^# \{0,1\}//p' "$0" | sed 1d >&2; exit 2; }
url=${1%/} model=$2 tokenizer=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
venv=${VENV:-$here/.venv-aiperf}
report=${REPORT:-$PWD/aiperf-report}

if [ ! -x "$venv/bin/aiperf" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "aiperf${VERSION:+==$VERSION}"
fi
"$venv/bin/python" -m pip show aiperf | sed -n 's/^Version: /aiperf /p'
mkdir -p "$report"
"$venv/bin/aiperf" profile \
    --url "$url" --model "$model" --tokenizer "$tokenizer" \
    --endpoint-type "${ENDPOINT:-chat}" --streaming \
    --concurrency "${CONCURRENCY:-8}" --request-count "${REQUESTS:-32}" \
    --synthetic-input-tokens-mean 64 --synthetic-input-tokens-stddev 0 \
    --output-tokens-mean 32 --output-tokens-stddev 0 \
    --artifact-dir "$report" "$@"
echo "report: $report"
