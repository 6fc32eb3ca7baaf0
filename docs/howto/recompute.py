"""Recompute every ratio of an ablation from its raw log, with the standard library alone: python recompute.py ABLATION_FOLDER"""

import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path


def measure(text, run):  # such as "output tok/s" or "TTFT p99 [chat]", of a run's requests; not a number where there is none
    name, figure, kind = re.fullmatch(r"(\S+)(?: ([^[]\S*))?(?: \[(.+)\])?", text).groups()
    requests = [r for r in run if kind in (None, r.get("class_name", "default"))]
    good = [r for r in requests if r.get("finish_reason") in ("length", "stop") and not r.get("error")]
    lost = [math.inf] * (len(requests) - len(good))  # seconds, infinite for a request without the value
    times, prompts = [r["token_times"] for r in good], sum(r["num_prompt_tokens"] for r in good)
    if name == "failed":
        return len(lost)
    if figure in (None, "tok/s"):
        made = sum(map(len, times))
        return {"req/s": len(good), "output": made, "total": made + prompts}[name] / (max((r["ended"] for r in run), default=0) or math.inf)
    seconds = {
        "queue": [r.get("first_scheduled", math.inf) - r["sent"] for r in requests],
        "TTFT": [r.get("token_times", [math.inf])[0] - r["sent"] for r in requests],
        "ITL": [b - a for r in requests for a, b in pairwise(r.get("token_times", [])) if b > a],  # one a pause between tokens
        "TPOT": [(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1] + lost,
        "E2E": [r["token_times"][-1] - r["sent"] for r in good] + lost,
    }
    values = sorted(value for value in seconds[name] if figure != "mean" or value < math.inf)
    if figure == "mean":
        return sum(values) / (len(values) or math.nan)
    place = (len(values) - 1) * float(figure[1:]) / 100  # a percentile between two values is interpolated
    low, high = (values[math.floor(place)], values[math.ceil(place)]) if values else (math.nan, math.nan)
    return low if low == high else low + (high - low) * (place % 1)


ablation = json.loads(((folder := Path(sys.argv[1])) / "ablation.json").read_text())
for scenario, cell in ((s, c) for s, cells in ablation["cells"].items() for c in cells if c["parent"] and not c["left_out"]):
    names, repeats = (cell["name"], cell["parent"]), range(ablation["spec"]["repeats"])
    kept = cell.get("holds") and not any(f"{scenario}/{name}/{n}" in ablation["broken"] for name in names for n in repeats)
    compared = ablation.get("compared", {scenario: repeats}).get(scenario, ()) if kept else ()  # repeats whose tokens were
    files = [[folder / "runs" / scenario / name / str(n) / "requests.jsonl" for name in names] for n in compared]
    pairs = [[[*map(json.loads, file.read_text().splitlines())] for file in pair] for pair in files if all(map(Path.is_file, pair))]
    failed = [sum(measure("failed", pair[side]) for pair in pairs) for side in (0, 1)]  # who fails more has less to do: no ratio
    for text in ablation["spec"]["compared"]:
        values = [[measure(text, run) for run in pair] for pair in pairs]
        good = values and failed[0] <= failed[1] and all(0 < value < math.inf for pair in values for value in pair)
        logs = sorted(math.log(one / other) for one, other in values) if good else [math.nan]
        middle = logs[len(logs) // 5 : -(len(logs) // 5)] if len(logs) >= 16 else logs  # of many repeats not the fifth at each end
        print(scenario, *names, text, f"{math.exp(sum(middle) / len(middle)):.6f}", sep="\t")
