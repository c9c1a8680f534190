"""Talks to `deltafin stream` through a terminal of its own. Arguments: the program, a home."""

import fcntl, json, os, pty, re, select, signal, struct, subprocess, sys, termios, time

program, home = sys.argv[1:3]
flags = ["--model", "demo", "--home", home, "--reserve", "0", "--max-tokens", "24"]
plain = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    def __init__(self, *more):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(program, [program, "stream", *flags, *more])
        self.pid, self.text, self.seen = pid, "", 0
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def read(self, seconds):
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.text += plain.sub("", data.decode("utf-8", "replace"))
        return bool(data)

    def expect(self, what, seconds=120):
        end = time.time() + seconds
        while what not in self.text[self.seen:]:
            assert time.time() < end, f"no {what!r} in {self.text[self.seen:]!r}"
            self.read(1)
        self.seen = self.text.index(what, self.seen) + len(what)

    def send(self, text):
        os.write(self.fd, text.encode())

    def end(self, seconds=120):
        end = time.time() + seconds
        while True:
            self.read(0.2)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.time() < end, f"still there: {self.text[-400:]!r}"


def sessions(*args):
    out = subprocess.run([program, "sessions", *args, "--home", home], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


talk = Terminal()
talk.expect("kept as chat-1")
talk.expect("> ")
talk.send("/help\r")
talk.expect("/retry")
talk.expect("> ")
talk.send("/effort max\r")
talk.expect("\n> ")
talk.send("/system Be brief.\r")
talk.expect("holds from the beginning")
talk.expect("\n> ")
talk.send("Who are\\\r")
talk.expect(". ")
talk.send("you?\r")
talk.expect("\n> ")
talk.send("/stats\r")
talk.expect("24 new tokens")
talk.expect("\n> ")
talk.send("/nonsense\r")
talk.expect("there is no /nonsense")
talk.expect("\n> ")
talk.send('"""one\r')
talk.expect(". ")
talk.send('two"""\r')
talk.expect("\n> ")
talk.send("/undo\r")
talk.expect("taken back")
talk.expect("\n> ")
talk.send("\x04")
assert talk.end() == 0
shown = sessions("show", "chat-1", "--json")
said = [m["content"] for m in shown["messages"] if m["role"] == "user"]
assert said == ["Who are\nyou?"], said
assert (shown["system"], shown["reasoning_effort"]) == ("Be brief.", "max"), shown

# Killed in the middle of a reply, it goes on by itself; history is there.
flags[flags.index("24")] = "600"
for pause in (0.05, 0.1, 0.2, 0.02, 0.3, 0.01):
    talk = Terminal("--session", "chat-1")
    talk.expect("> ")
    talk.send("Tell me a story.\r")
    time.sleep(pause)
    os.kill(talk.pid, signal.SIGKILL)
    assert talk.end() == -signal.SIGKILL
    before = sessions("show", "chat-1", "--json")
    if before["unfinished"]:
        break
if before["unfinished"]:  # else the machine was too fast to be caught
    talk = Terminal("--session", "chat-1")
    talk.expect("going on with the unfinished reply")
    os.kill(talk.pid, signal.SIGINT)
    code = talk.end()
    after = sessions("show", "chat-1", "--json")
    if after["unfinished"]:
        assert code == 130, code
        kept = before["token_ids"]
        assert after["token_ids"][: len(kept)] == kept
        assert len(after["token_ids"]) >= len(kept)

# At the prompt a signal ends at once, and Ctrl-C twice leaves.
talk = Terminal("--session", "another")
talk.expect("> ")
os.kill(talk.pid, signal.SIGTERM)
assert talk.end() == 130
talk = Terminal("--session", "another")
talk.expect("> ")
talk.send("\x1b[A")
talk.expect("Tell me a story.")
talk.send("\x03")
talk.expect("Ctrl-C again leaves")
talk.send("\x03")
assert talk.end() == 130
print("talked")
