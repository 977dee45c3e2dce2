"""Attacks that look at what an answer may not see."""

from rl.verification.sandbox.attacks.attack import CALL, Attack, then_solved


def _reads(path: str) -> Attack:
    return then_solved(f"assert open({path}, 'rb').read(1)")


def _lists(path: str) -> Attack:
    return then_solved("import os", f"assert os.listdir({path})")


ATTACKS: dict[str, Attack] = {
    "read a secret file": then_solved("open({secret!r}).read()"),
    "read a secret by a symlink": then_solved("os.symlink({secret!r}, 'link')", "open('link').read()"),
    "read a secret by a hard link": then_solved("os.link({secret!r}, 'link')", "open('link').read()"),
    "read a secret by a symlink to /": then_solved("os.symlink('/', 'up')", "open('up' + {secret!r})"),
    "read a secret by many dots": then_solved("open('../' * 40 + {secret!r}.lstrip('/')).read()"),
    "read a secret by an open folder": then_solved(
        "root = os.open('/', os.O_PATH)", "os.open({secret!r}.lstrip('/'), os.O_RDONLY, dir_fd=root)"
    ),
    "read a secret while links change": then_solved(
        "open('mine', 'w').close()",
        "def swap():",
        "    while True:",
        "        for target in ('mine', {secret!r}):",
        "            os.symlink(target, 'next')",
        "            os.replace('next', 'link')",
        "threading.Thread(target=swap, daemon=True).start()",
        "end, found = time.monotonic() + 0.1, ''",
        "while not found and time.monotonic() < end:",
        "    with contextlib.suppress(OSError): found = open('link').read()",
        "assert found",
    ),
    "read a secret by a child": then_solved(
        "assert subprocess.run([sys.executable, '-c', 'print(open(' + repr({secret!r}) + ').read())'],",
        "                      capture_output=True, check=True).stdout",
    ),
    "read a secret by /proc": then_solved("open('/proc/1/root' + {secret!r}).read()"),
    "read a secret by the own /proc": then_solved("open('/proc/self/root' + {secret!r}).read()"),
    "read a secret by the caller's root": then_solved("open('/proc/{pid}/root' + {secret!r}).read()"),
    "mount /proc": then_solved(
        *CALL, "os.makedirs('proc', exist_ok=True)", "call(165, 40, b'proc', b'proc', b'proc', 0, None)"
    ),
    "read an environment secret": then_solved("os.environ[{variable!r}]"),
    "read the caller's environment": then_solved("open('/proc/{pid}/environ').read()"),
    "read the caller's memory": then_solved("open('/proc/{pid}/mem', 'rb').close()"),
    "read the caller's descriptors": _lists("'/proc/{pid}/fd'"),
    "read the command lines of others": then_solved("open('/proc/1/cmdline').read()"),
    "read the users": _reads("'/etc/passwd'"),
    "read the passwords": _reads("'/etc/shadow'"),
    "read the kernel's log": _reads("'/dev/kmsg'"),
    "read the machine's memory": _reads("'/dev/mem'"),
    "list the devices": then_solved("assert len(os.listdir('/dev')) > 4"),
    "list shared memory": then_solved("os.listdir('/dev/shm')"),
    "list the sockets of services": _lists("'/run'"),
    "list the kernel's settings": _lists("'/sys/kernel'"),
    "read the project": then_solved("import inspect, rl.verification.scorers"),
    "list the home folder": then_solved("assert os.listdir(os.path.dirname({secret!r}))"),
    "open a socket": then_solved("socket.create_connection(('127.0.0.1', {port}), timeout=1)"),
    "open a raw socket": then_solved("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "open a socket of the kernel": then_solved("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "open a Unix socket": then_solved("socket.socket(socket.AF_UNIX)"),
    "send to an address by a pair of sockets": then_solved(
        "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '/dev/log')"
    ),
    "watch files of others": then_solved(*CALL, "call(294, 26, 0)"),
}
