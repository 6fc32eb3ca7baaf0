"""Recompute every ratio of an ablation from its raw log, with the standard library alone: python recompute.py ABLATION_FOLDER"""

import json
import math
import re
import statistics
import sys
from itertools import pairwise
from pathlib import Path


def latencies(name, requests, good):  # seconds, infinite for a request without the value; of ITL one a pause between tokens
    lost = [math.inf] * (len(requests) - len(good))
    if name == "ITL":
        return [b - a for r in requests for a, b in pairwise(r.get("token_times", [])) if b > a]
    if name == "TTFT":
        return [r["token_times"][0] - r["sent"] if "token_times" in r else math.inf for r in requests]
    if name == "E2E":
        return [r["token_times"][-1] - r["sent"] for r in good] + lost
    if name == "TPOT":
        return [(t[-1] - t[0]) / (len(t) - 1) for t in (r["token_times"] for r in good) if len(t) > 1] + lost
    return [r.get("first_scheduled", math.inf) - r["sent"] for r in requests]  # queue


def measure(text, run):  # such as "output tok/s" or "TTFT p99 [chat]", of one run
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    duration = max(r["ended"] for r in requests)
    name, figure, kind = re.fullmatch(r"(\S+)(?: ([^[]\S*))?(?: \[(.+)\])?", text).groups()
    requests = [r for r in requests if kind in (None, r.get("class_name", "default"))]
    good = [r for r in requests if r.get("finish_reason") in ("length", "stop") and not r.get("error")]
    output, prompts = sum(len(r["token_times"]) for r in good), sum(r["num_prompt_tokens"] for r in good)
    if figure in (None, "tok/s"):
        return {"req/s": len(good), "output": output, "total": output + prompts}[name] / duration
    values = sorted(latencies(name, requests, good))
    if figure == "mean":
        return statistics.mean(value for value in values if value < math.inf)
    place = (len(values) - 1) * float(figure[1:]) / 100  # a percentile between two values is interpolated
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return low if low == high else low + (high - low) * (place % 1)


folder = Path(sys.argv[1])
ablation = json.loads((folder / "ablation.json").read_text())
for scenario, cell in ((s, c) for s, cells in ablation["cells"].items() for c in cells if c["parent"] and not c["left_out"]):
    mine, parents = (folder / "runs" / scenario / name for name in (cell["name"], cell["parent"]))
    both = [(run, parents / run.name) for run in mine.glob("*") if (parents / run.name).is_dir()]
    for text in ablation["spec"]["compared"]:
        logs = [math.log(measure(text, one) / measure(text, other)) for one, other in both]
        print(scenario, cell["name"], cell["parent"], text, f"{math.exp(statistics.mean(logs)):.6f}", sep="\t")
