#!/usr/bin/env python3
"""Measures what a run reads and holds under a memory limit, from the system's own counters.

    scripts/residency.py run BINARY HOME --limit 1.9GB --tokens 8 --repeat 5 -- --core mmap
    scripts/residency.py within run BINARY HOME --limits 0.5GB,1GB,2GB,4GB --prompt 1024
    scripts/residency.py plan BINARY HOME MODEL --budgets 1.2GB,1.9GB

The limit is set by a control group (version 1 or 2, writable; else the run is refused). Bytes are those of
/proc/PID/io, memory that of /proc/PID/status every 50 ms and the group's own peak. Decode is told from prefill by two
runs that differ in tokens alone. The page cache is dropped before each run where that is allowed.
"""
import argparse, json, os, statistics, subprocess, sys, time

V1 = "/sys/fs/cgroup/memory"


def size(text):
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * scale)
    return int(text)


class Group:
    def __init__(self, limit):
        self.v1 = os.path.isdir(V1)
        root = V1 if self.v1 else "/sys/fs/cgroup"
        own = next((l.split(":", 2)[2].strip() for l in open("/proc/self/cgroup")
                    if ("memory" in l.split(":")[1].split(",") if self.v1 else l.startswith("0::"))), "/")
        parent = root + own if os.path.isdir(root + own) else root
        self.path = f"{parent}/deltafin-{os.getpid()}-{time.monotonic_ns()}"
        os.mkdir(self.path)
        self.write("memory.limit_in_bytes" if self.v1 else "memory.max", limit)

    def write(self, name, value):
        with open(f"{self.path}/{name}", "w") as f:
            f.write(str(value))

    def read(self, name):
        try:
            with open(f"{self.path}/{name}") as f:
                return f.read().strip()
        except OSError:
            return ""

    def peak(self):
        return int(self.read("memory.max_usage_in_bytes" if self.v1 else "memory.peak") or 0)

    def killed(self):
        text = self.read("memory.oom_control" if self.v1 else "memory.events")
        return any(l.startswith("oom_kill ") and not l.endswith(" 0") for l in text.splitlines())

    def remove(self):
        os.rmdir(self.path)


def drop():
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("3")
    except OSError:
        print("the page cache cannot be dropped here", file=sys.stderr)


def run(args, tokens, prompt):
    drop()
    group = Group(args.limit) if args.limit else None
    ids = ",".join(str(7 + 13 * i % 1000) for i in range(prompt))
    command = [args.binary, args.command, "--home", args.home, "--json", "--ids", ids,
               "--max-tokens", str(tokens)] + args.more

    def enter():
        if group:
            group.write("cgroup.procs", os.getpid())

    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=enter)
    peak, io = 0, {}
    while child.poll() is None:
        try:
            status = dict(l.split(":", 1) for l in open(f"/proc/{child.pid}/status") if ":" in l)
            # What is locked is resident too, and counted there; what is locked and never touched is not.
            held = max(int(status["VmRSS"].split()[0]), int(status["VmLck"].split()[0]))
            peak = max(peak, held * 1024)
            io = dict(l.split(": ") for l in open(f"/proc/{child.pid}/io"))
        except (OSError, KeyError, ValueError):
            pass
        time.sleep(0.05)
    wall = time.monotonic() - began
    out = child.stdout.read()
    report = json.loads(out) if out.strip() else {}
    found = {
        "code": child.returncode, "wall": wall, "rss": peak,
        "read": int(io.get("read_bytes", 0)),
        "group_peak": group.peak() if group else 0,
        "killed": group.killed() if group else False,
        "decode": report.get("seconds", {}).get("decode", 0.0),
        "prefill": report.get("seconds", {}).get("prefill", 0.0),
        "bytes": report.get("bytes"), "experts": report.get("experts"), "ids": report.get("token_ids"),
        "memory": report.get("memory"),
    }
    if group:
        group.remove()
    return found


def within(args):
    """Line by line: was a limit kept, and the budget that was made of it, through prefill, decode and eviction?"""
    failed = False
    for limit in args.limits.split(","):
        args.limit = size(limit)
        found = run(args, args.tokens, args.prompt)
        budget = (found["memory"] or {}).get("budget") or 0
        held = found["rss"]
        over = held / budget if budget else float("inf")
        bad = bool(found["code"] or found["killed"] or over > 1.02)
        failed |= bad
        print(json.dumps({"limit": args.limit, "code": found["code"], "killed": found["killed"], "budget": budget,
                          "rss_and_locked": held, "of_budget": round(over, 3), "group_peak": found["group_peak"],
                          "prefill": found["prefill"], "decode": found["decode"], "experts": found["experts"],
                          "kept": not bad}))
        sys.stdout.flush()
    return failed


def planned(args):
    """What `plan` says, against what `bench` then measures: seconds and bytes a token, seconds to the first token."""
    ids = ",".join(str(7 + 13 * i % 1000) for i in range(args.prompt))
    place = ["--home", args.home, "--model", args.model, "--offline"]

    def ask(command):
        out = subprocess.run([args.binary] + command + place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        return json.loads(out.stdout)

    for budget in args.budgets.split(","):
        plans, benches = [], []
        for _ in range(args.rounds):
            # By turns: a disk is not as fast now as it was a minute ago.
            plans.append(ask(["plan", "--json", "--ram", budget, "--prompt-tokens", str(args.prompt)]))
            benches.append(ask(["bench", "--json", "--ram", budget, "--ids", ids, "--tokens", str(args.tokens),
                                "--rounds", "1", "--warm-up", "0"])["arms"][0]["figures"])
        pairs = {
            "seconds": (lambda p: p["token"]["seconds"], lambda b: b["seconds"]["all"]["median"]),
            "compute": (lambda p: p["token"]["compute"], lambda b: b["seconds"]["compute"]["median"]),
            "core_disk": (lambda p: p["token"]["bytes"]["core_disk"], lambda b: b["bytes"]["core_disk"]["median"]),
            "expert_disk": (lambda p: p["token"]["bytes"]["expert_disk"], lambda b: b["bytes"]["experts_disk"]["median"]),
            "first_token": (lambda p: p["prompt"]["first_token"], lambda b: b["first_token"]["median"]),
        }
        row = {"budget": budget, "disk_rate": statistics.median(p["rates"]["disk"] for p in plans),
               "core_rate": statistics.median(p["rates"]["core_disk"] for p in plans)}
        for name, (of_plan, of_bench) in pairs.items():
            p, m = statistics.median(map(of_plan, plans)), statistics.median(map(of_bench, benches))
            row[name] = {"plan": round(p, 4), "measured": round(m, 4), "error": round(p / m - 1, 3) if m else None}
        print(json.dumps(row))
        sys.stdout.flush()


def main():
    if sys.argv[1:2] == ["plan"]:
        p = argparse.ArgumentParser(description=planned.__doc__)
        p.add_argument("plan")
        p.add_argument("binary")
        p.add_argument("home")
        p.add_argument("model")
        p.add_argument("--budgets", required=True)
        p.add_argument("--tokens", type=int, default=10)
        p.add_argument("--prompt", type=int, default=64)
        p.add_argument("--rounds", type=int, default=3)
        return planned(p.parse_args())
    if sys.argv[1:2] == ["within"]:
        p = argparse.ArgumentParser(description=within.__doc__)
        p.add_argument("within")
        p.add_argument("command", choices=["run", "stream"])
        p.add_argument("binary")
        p.add_argument("home")
        p.add_argument("--limits", default="0.5GB,1GB,2GB,4GB")
        p.add_argument("--tokens", type=int, default=8)
        p.add_argument("--prompt", type=int, default=1024)
        own, more = sys.argv[1:], []
        if "--" in own:
            own, more = own[:own.index("--")], own[own.index("--") + 1:]
        args = p.parse_args(own)
        args.more = more
        return within(args)
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=["run", "stream"])
    p.add_argument("binary")
    p.add_argument("home")
    p.add_argument("--limit", type=size, default=0)
    p.add_argument("--tokens", type=int, default=8)
    p.add_argument("--prompt", type=int, default=4)
    p.add_argument("--repeat", type=int, default=1)
    own, more = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1:]  # what follows is the program's
    args = p.parse_args(own)
    args.more = more
    rows = []
    for _ in range(args.repeat):
        # A short and a long run: what they differ by is decode alone.
        short, long = run(args, 2, args.prompt), run(args, 2 + args.tokens, args.prompt)
        if short["code"] or long["code"]:
            print(json.dumps({"short": short, "long": long}))
            return 1
        rows.append({
            "read_a_token": (long["read"] - short["read"]) / args.tokens,
            "seconds_a_token": (long["decode"] - short["decode"]) / args.tokens,
            "rss": max(short["rss"], long["rss"]), "group_peak": max(short["group_peak"], long["group_peak"]),
            "killed": short["killed"] or long["killed"], "prefill": long["prefill"],
            "memory_experts": long["experts"]["memory"], "disk_experts": long["experts"]["disk"],
        })
        print(json.dumps(rows[-1]), file=sys.stderr)
    median = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    print(json.dumps({"limit": args.limit, "more": args.more, **median}))


sys.exit(main())
