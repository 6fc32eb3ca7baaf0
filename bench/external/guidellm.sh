#!/usr/bin/env bash
# guidellm against a running server: bench/external/guidellm.sh URL TOKENIZER [MORE ARGUMENTS]
#
#   octavo serve smollm2-135m &
#   bench/external/guidellm.sh http://127.0.0.1:8000 ~/.cache/octavo/gguf/*/
#
# TOKENIZER is a folder with the model's tokenizer files: guidellm makes prompts of a wanted length with it. guidellm goes into an environment
# of its own, bench/external/.venv-guidellm (or $VENV). The report is printed, and lies as JSON and CSV in the folder named at the end.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 's/^# \{0,1\}//p' "$0" | sed 1d >&2; exit 2; }
url=${1%/} tokenizer=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
venv=${VENV:-$here/.venv-guidellm}
report=${REPORT:-$PWD/guidellm-report}

if [ ! -x "$venv/bin/guidellm" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "guidellm${VERSION:+==$VERSION}"
fi
"$venv/bin/guidellm" --version
mkdir -p "$report"
HF_HUB_OFFLINE=1 "$venv/bin/guidellm" run \
    --backend "kind=openai_http,target=$url" \
    --tokenizer "kind=hf_auto,model=$tokenizer" \
    --data "${DATA:-kind=synthetic_text,prompt_tokens=64,output_tokens=32}" \
    --profile "${PROFILE:-kind=concurrent,streams=8}" \
    --constraint "kind=max_requests,count=${REQUESTS:-32}" \
    --output kind=console --output "kind=json,path=$report/guidellm.json" --output "kind=csv,path=$report/guidellm.csv" \
    --disable-progress "$@"
echo "report: $report"
