#!/usr/bin/env python3
"""What company saves: bytes and time a token for 1 to 32 sequences that share every pass over the weights.

    scripts/sweeps.py BINARY --home HOME                            # the small model, from its loopback hub
    scripts/sweeps.py BINARY --home HOME --hub FOLDER --ram 1.2GB   # a checkpoint of examples/synth.rs

Three ways to run: all in memory (time), a core larger than memory (bytes from the disk), and no cache at all (bytes
from the hub, beside the union of the routes that --trace has recorded). Each figure is the difference of two runs that
differ in the length of the replies, so that opening and reading prompts does not count. For whole runs the bytes from
the hub and of the few experts that memory had room for must be those of the union, to the byte; exit code 1 if not.
"""
import argparse, json, os, random, subprocess, sys, tempfile


def requests(path, sequences, tokens, vocab):
    draw = random.Random(7)
    with open(path, "w") as f:
        for n in range(sequences):
            prompt = [draw.randrange(vocab) for _ in range(4)]
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 1, "seed": n}
            line = {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
            f.write(json.dumps(line) + "\n")


def batch(args, folder, sequences, tokens, flags):
    given, made = f"{folder}/in.jsonl", f"{folder}/out.jsonl"
    requests(given, sequences, tokens, args.vocab)
    if os.path.exists(made):
        os.remove(made)
    command = [args.binary, "batch", given, made, "--home", args.home, "--sequences", str(sequences), "--json",
               "--reserve", "0", "--threads", str(args.threads)]
    command += ["--hub", args.hub] if args.hub else ["--model", "demo"]
    done = subprocess.run(command + flags, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command + flags)}\n{done.stderr}")
    told = json.loads(done.stdout)
    told["rows"] = told["tokens"]["prompt"] + told["tokens"]["generated"] - sequences
    return told


def union(trace):
    """Experts that the sweeps of a trace used, and the bytes of one."""
    with open(trace) as f:
        head, *sweeps = [json.loads(line) for line in f]
    return sum(len(ids) for s in sweeps for _, ids in s["sweep"]), head["expert_bytes"]


def pair(args, folder, sequences, flags):
    runs = []
    for tokens in (args.tokens, 3 * args.tokens):
        trace = f"{folder}/trace"
        if os.path.exists(trace):
            os.remove(trace)
        told = batch(args, folder, sequences, tokens, flags + ["--trace", trace])
        told["union"], told["expert"] = union(trace)
        runs.append(told)
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--home", required=True)
    parser.add_argument("--hub", help="a checkpoint's folder; without it the small model")
    parser.add_argument("--ram", default="36MB", help="memory for the two ways that have little of it")
    parser.add_argument("--vocab", type=int, default=1000, help="prompts are of ids below this")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", default="1,4,8,16,32")
    parser.add_argument("--ways", default="memory,disk,hub")
    parser.add_argument("--hold", action="store_true", help="disk bytes at 32 sequences must be 0.35 of one's or less")
    args = parser.parse_args()
    counts = [int(n) for n in args.sequences.split(",")]
    small = ["--ram", args.ram]
    ways = {"memory": ["--cache", "unlimited"], "disk": ["--cache", "unlimited"] + small, "hub": ["--cache", "0"] + small}
    wrong = []
    print(f"load {os.getloadavg()[0]:.1f}")
    print("| way | sequences | s a token | x one | disk MB a token | of one | hub MB a token | union / rows, MB |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for way in args.ways.split(","):
            first = None
            batch(args, folder, max(counts), 3 * args.tokens, ways[way])  # what is installed once is no token's
            for sequences in counts:
                short, long = pair(args, folder, sequences, ways[way])
                rows = long["rows"] - short["rows"]
                per = lambda f: (f(long) - f(short)) / rows
                took = per(lambda t: t["seconds"])
                disk = per(lambda t: t["bytes"]["disk"] + t["bytes"]["core_disk"])
                hub = per(lambda t: t["bytes"]["hub"])
                used = per(lambda t: t["union"] * t["expert"])
                first = first or (took, disk)
                share = disk / first[1] if first[1] else 0
                print(f"| {way} | {sequences} | {took:.4f} | {first[0] / took:.2f} | {disk / 1e6:.3f} | {share:.3f} "
                      f"| {hub / 1e6:.3f} | {used / 1e6:.3f} |", flush=True)
                if way == "hub":
                    for run in (short, long):
                        moved = run["bytes"]["hub"] + run["bytes"]["memory"]
                        if moved != run["union"] * run["expert"] or run["bytes"]["disk"]:
                            wrong.append(f"{sequences} sequences: {run['bytes']} moved, "
                                         f"{run['union']} experts of {run['expert']} in the routes")
                if args.hold and way == "disk" and sequences >= 32 and share > 0.35:
                    wrong.append(f"{sequences} sequences: {share:.3f} of one's bytes from the disk")
    print(f"load {os.getloadavg()[0]:.1f}")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
