"""Attacks that use up memory, disk, processes or time."""

from rl.verification.sandbox.attacks.attack import CALL, Attack, then_solved, then_wrong

ATTACKS: dict[str, Attack] = {
    "fork bomb": then_solved("for _ in range(200):", "    if os.fork() == 0:", "        time.sleep(100)"),
    "fork bomb that goes on": then_wrong(
        "while True:", "    try:", "        os.fork()", "    except OSError:", "        pass", hangs=True
    ),
    "thread bomb": then_solved(
        "for _ in range(200):", "    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    ),
    "memory bomb": then_solved("held = bytearray(2 << 30)"),
    "memory bomb in a result": Attack("def solve(x):\n    return [0] * (1 << 40)\n"),
    "fill the disk": then_solved("for number in range(64):", "    open(f'{number}', 'wb').write(bytes(1 << 20))"),
    "fill the disk with files": then_solved("for number in range(100_000):", "    open(f'{number}', 'w')"),
    "many open files": then_solved("held = [open('/dev/null') for _ in range(1000)]"),
    "loop": then_wrong("while True: pass", hangs=True),
    "hang in C": then_wrong("pow(int('9' * 4000), 10**8)", hangs=True),
    "sleep, deaf to signals": then_wrong(
        "for number in (1, 2, 3, 15, 24):", "    signal.signal(number, signal.SIG_IGN)", "time.sleep(1000)", hangs=True
    ),
    "print a gigabyte": Attack("for _ in range(1 << 20):\n    print('x' * 1023)\nprint(0)\n", script=True),
    "a result without end": Attack("def solve(x):\n    return 'x' * (1 << 25)\n"),
    "a result without bottom": Attack(
        "def solve(x):\n    held = []\n    for _ in range(100_000):\n        held = [held]\n    return held\n"
    ),
    "memory of an unnamed file": then_solved(
        *CALL, "held = call(319, 279, b'x', 0)", "for _ in range(1200): os.write(held, bytes(1 << 20))"
    ),
    "memory of a secret file": then_solved(*CALL, "os.ftruncate(call(447, 447, 0), 1 << 31)"),
    "memory that processes share": then_solved("held = mmap.mmap(-1, 1 << 30)", "held[::4096]"),
    "memory in pieces that processes share": then_solved("held = [mmap.mmap(-1, 32 << 20) for _ in range(64)]"),
    "memory of pipes": then_solved(
        "for _ in range(24): fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",  # F_SETPIPE_SZ
    ),
    "raise the limit of memory": then_solved("resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"),
    "raise the limit of processes": then_solved("resource.setrlimit(resource.RLIMIT_NPROC, (10_000, 10_000))"),
    "raise the limit of the warm process": then_solved(
        "resource.prlimit(os.getppid() or 1, resource.RLIMIT_CPU, (1, 1))"
    ),
    "a file with a hole": then_solved("open('hole', 'wb').truncate(1 << 34)"),
    "folders without bottom": then_solved("for _ in range(100_000):", "    os.mkdir('in')", "    os.chdir('in')"),
    "links without end": then_solved(
        "open('one', 'w').close()", "for number in range(100_000): os.symlink('one', f'{number}')"
    ),
    "a chain of forks": then_solved(
        "ours, theirs = os.pipe()",
        "for _ in range(200):",
        "    try: pid = os.fork()",
        "    except OSError: os._exit(1)",
        "    if pid:",
        "        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if _ else 0)",
        "os._exit(0)",
    ),
    "processes as children of children": then_solved(
        "held = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)']) for _ in range(40)]"
    ),
    "a regular expression without end": then_wrong("re.match('(a+)+$', 'a' * 64 + 'b')", hangs=True),
    "stop the own process": then_wrong(
        "if (pid := os.fork()) == 0:", "    os.kill(os.getpid(), signal.SIGSTOP)", "os.waitpid(pid, 0)", hangs=True
    ),
    "recursion until the stack ends": then_wrong(
        "sys.setrecursionlimit(1 << 30)", "def down(x): return [*map(down, [x])]", "down(0)"
    ),
    "write to address 0": then_wrong("ctypes.memset(0, 0, 1)"),
    "a number of ten million digits": Attack("def solve(x):\n    return 1 << 33_000_000\n"),
    "a text of a million lines": Attack("def solve(x):\n    return '\\n' * (1 << 22)\n"),
    "a name too long to print": then_solved("class X:\n    def __repr__(self): return 'x' * (1 << 30)", "repr(X())"),
    "an error too long to print": then_wrong("raise ValueError('x' * (1 << 24))"),
    "print errors without end": then_wrong("for _ in range(1 << 14): sys.stderr.write('x' * 1024)"),
}
