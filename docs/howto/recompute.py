"""Recompute every ratio of an ablation from its raw log, with the standard library alone: python recompute.py ABLATION_FOLDER"""
import json
import math
import re
import statistics
import sys
from itertools import pairwise
from pathlib import Path

def answered(r):
    return r.get("finish_reason") in ("length", "stop") and not r.get("error")

def latencies(name, requests):  # seconds, one a request, infinite where it has none; of ITL one a pause between tokens
    times = [(r, r.get("token_times", [])) for r in requests]
    if name == "ITL":
        return [b - a for _, t in times for a, b in pairwise(t) if b > a]
    if name == "TTFT":
        return [t[0] - r["sent"] if t else math.inf for r, t in times]
    if name == "E2E":
        return [t[-1] - r["sent"] if answered(r) else math.inf for r, t in times]
    if name == "TPOT":
        return [(t[-1] - t[0]) / (len(t) - 1) if answered(r) else math.inf for r, t in times if not (answered(r) and len(t) == 1)]
    return [r.get("first_scheduled", math.inf) - r["sent"] for r in requests]  # queue

def percentile(values, percent):  # between two values it is interpolated
    values, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return low if low == high else low + (high - low) * (place % 1)

def measure(text, run):  # such as "output tok/s" or "TTFT p99 [chat]", of one repeat's requests.jsonl
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    duration = max(r["ended"] for r in requests)
    name, kind = re.fullmatch(r"(.*?)(?: \[(.+)\])?", text).groups()
    requests = [r for r in requests if kind in (None, r.get("class_name", "default"))]
    good = [r for r in requests if answered(r)]
    output, prompts = sum(len(r["token_times"]) for r in good), sum(r["num_prompt_tokens"] for r in good)
    rates = {"output tok/s": output, "total tok/s": output + prompts, "req/s": len(good)}
    if name in rates:
        return rates[name] / duration
    latency, figure = name.split()
    values = latencies(latency, requests)
    return percentile(values, float(figure[1:])) if figure != "mean" else statistics.mean(v for v in values if v < math.inf)

folder = Path(sys.argv[1])
ablation = json.loads((folder / "ablation.json").read_text())
for scenario, cell in ((name, one) for name, cells in ablation["cells"].items() for one in cells if one["parent"] and not one["left_out"]):
    mine, parents = (folder / "runs" / scenario / name for name in (cell["name"], cell["parent"]))
    both = [(one, parents / one.name) for one in mine.glob("*") if (parents / one.name).is_dir()]
    for text in ablation["spec"]["compared"]:
        ratio = statistics.geometric_mean(measure(text, one) / measure(text, other) for one, other in both)
        print(scenario, cell["name"], cell["parent"], text, f"{ratio:.6f}", sep="\t")
