#!/usr/bin/env python3
"""What company costs: requests one by one, then all at once, on one server. Prints a line of JSON.

    cargo run --release --example synth -- target/synth/local/synthetic-k3-4gb
    deltafin fetch --home target/synth-home --cache unlimited --hub target/synth/local/synthetic-k3-4gb
    scripts/throughput.py target/release/deltafin target/synth-home local/synthetic-k3-4gb --ram 1.27GB

Exit code 1 where an answer had other bits in company, or all at once were less than `--least` times one.
Tokens a second are those of decoding: for one, over the seconds its own decoding took; for all, over the
seconds of whoever took longest, in which the others' prompts are read too.
"""
import argparse, json, statistics, subprocess, sys, threading, urllib.request


def serve(args):
    command = [args.binary, "serve", "--port", "0", "--offline", "--home", args.home, "--model", args.model,
               "--ram", args.ram, "--parallel", str(args.at_once), "--states", "0"] + args.more
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in child.stderr:
        if "is ready" in line:
            # Whoever writes to a pipe that nobody reads stops in the end.
            threading.Thread(target=lambda: [None for _ in child.stderr], daemon=True).start()
            return child, line.split("http://")[1].split("/")[0]
    sys.exit("the server never became ready")


def ask(address, number, tokens):
    body = {
        "prompt": [[7 + (13 * number + 29 * at) % 1000 for at in range(16)]], "seed": number, "temperature": 1,
        "max_tokens": tokens, "logprobs": 0,
    }
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode())
    reply = json.load(urllib.request.urlopen(request, timeout=86400))
    usage, choice = reply["usage"], reply["choices"][0]
    return {
        "tokens": usage["completion_tokens"], "decode": usage["deltafin"]["seconds"]["decode"],
        "experts": usage["deltafin"]["experts"]["requested"], "bits": choice["logprobs"]["token_logprobs"],
    }


def read(child):
    with open(f"/proc/{child.pid}/io") as io:
        return int(dict(line.split(": ") for line in io)["read_bytes"])


def peak(child):
    with open(f"/proc/{child.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("binary")
    p.add_argument("home")
    p.add_argument("model")
    p.add_argument("--ram", default="1.27GB")
    p.add_argument("--at-once", type=int, default=8)
    p.add_argument("--tokens", type=int, default=24)
    p.add_argument("--least", type=float, default=3.0)
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[:own.index("--")], own[own.index("--") + 1:]
    args = p.parse_args(own)
    args.more = more
    child, address = serve(args)
    try:
        ask(address, 0, 2)  # what is read once, and pages that are touched once
        before = read(child)
        alone = [ask(address, n, args.tokens) for n in range(args.at_once)]
        between = read(child)
        together = [None] * args.at_once

        def one(n):
            together[n] = ask(address, n, args.tokens)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(args.at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = read(child)
        held = peak(child)
    finally:
        child.terminate()
        child.wait()
    made = sum(a["tokens"] for a in alone)
    rate_alone = statistics.median(a["tokens"] / a["decode"] for a in alone)
    rate_together = sum(a["tokens"] for a in together) / max(a["decode"] for a in together)
    same = [a["bits"] for a in alone] == [a["bits"] for a in together]
    times = rate_together / rate_alone
    print(json.dumps({
        "ram": args.ram, "at_once": args.at_once, "tokens": made, "same_bits": same,
        "tokens_per_second": {"one": round(rate_alone, 3), "all": round(rate_together, 3)},
        "times": round(times, 2),
        "read_bytes_per_token": {"one": (between - before) // made, "all": (after - between) // made},
        "experts_per_token": {
            "one": round(sum(a["experts"] for a in alone) / made, 1),
            "all": round(sum(a["experts"] for a in together) / made, 1),
        },
        "highest_rss": held,
    }))
    return 0 if same and times >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
