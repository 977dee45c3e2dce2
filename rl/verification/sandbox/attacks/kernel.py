"""Attacks that do what an answer may not do, most by a system call that a way out could begin with."""

from rl.verification.sandbox.attacks.attack import CALL, Attack, then_solved


def _calls(arguments: str, *lines: str) -> Attack:
    return then_solved(*CALL, *lines, f"call({arguments})")


_BUFFER = "room = ctypes.create_string_buffer(4096)"

ATTACKS: dict[str, Attack] = {
    "write outside of /tmp": then_solved("open('/usr/lib/mark', 'w').write('x')"),
    "write into Python": then_solved("open(json.__file__, 'a').write('x')"),
    "write into the own memory by /proc": then_solved("open('/proc/self/mem', 'r+b').close()"),
    "raise the own share of memory": then_solved("open('/proc/self/oom_score_adj', 'w').write('-1000')"),
    "remount the root": then_solved("assert ctypes.CDLL(None).mount(None, b'/', None, 4096 | 32, None) == 0"),
    "unmount the root": _calls("166, 39, b'/', 2"),
    "change the root": then_solved("os.chroot('.')"),
    "exchange the root": _calls("155, 41, b'.', b'.'"),
    "open a file system": _calls("430, 430, b'tmpfs', 0"),
    "copy the tree of files": _calls("428, 428, -100, b'/', 1"),
    "change attributes of a mount": _calls("442, 442, -100, b'/', 0, room, 32", _BUFFER),
    "make a device": then_solved("os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))"),
    "open a file by its handle": _calls("303, 264, -100, b'/', room, room, 0", _BUFFER),
    "become root": then_solved("os.setuid(0)"),
    "give a program root's rights": then_solved(
        "open('mine', 'w').close()", "os.chown('mine', 0, 0)", "os.chmod('mine', 0o4755)"
    ),
    "make a user namespace": then_solved("os.unshare(os.CLONE_NEWUSER)"),
    "make one by clone": _calls("56, 220, 0x10000000 | 17, 0, 0, 0, 0"),
    "make one by clone3": _calls(
        "435, 435, room, 64", _BUFFER, "room[0:8] = (0x10000000).to_bytes(8, 'little')", "room[32] = 17"
    ),
    "be a child of the parent": _calls("56, 220, 0x8000 | 17, 0, 0, 0, 0"),
    "enter another namespace": _calls("308, 268, os.open('/proc/1/ns/mnt', 0), 0"),
    "trace a process": then_solved("assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0"),
    "be traced": _calls("101, 117, 0, 0, 0, 0"),
    "read memory by a call": _calls("310, 270, os.getpid(), room, 0, room, 0, 0", _BUFFER),
    "write memory by a call": _calls("311, 271, os.getpid(), room, 0, room, 0, 0", _BUFFER),
    "compare processes": _calls("312, 272, os.getpid(), os.getpid(), 1, 0, 0"),
    "hold a process": _calls("434, 434, os.getpid(), 0"),
    "take a descriptor of a process": _calls("438, 438, call(434, 434, os.getpid(), 0), 0, 0"),
    "send a descriptor": then_solved("ours, theirs = socket.socketpair()", "socket.send_fds(ours, [b'x'], [0])"),
    "signal the caller": then_solved("os.kill({pid}, 9)"),
    "signal a thread of the caller": _calls("234, 131, {pid}, {pid}, 9"),
    "signal everything": then_solved("os.kill(-1, 9)"),
    "have the kernel signal the caller": then_solved("fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {pid})"),
    "leave the session": then_solved(
        "if (pid := os.fork()) == 0:",
        "    try: os.setsid()",
        "    except OSError: os._exit(1)",
        "    os._exit(0)",
        "assert os.waitpid(pid, 0)[1] == 0",
    ),
    "open a ring of calls": _calls("425, 425, 4, room", _BUFFER),
    "handle page faults": _calls("323, 282, 1"),
    "read a keyring": _calls("250, 219, 0, -3, 1"),
    "leave a key": _calls("248, 217, b'user', b'name', b'secret', 6, -3"),
    "keep a table in the kernel": _calls(
        "321, 280, 0, room, 72", _BUFFER, "room[0:16] = b''.join(one.to_bytes(4, 'little') for one in (2, 4, 4, 1))"
    ),
    "count events of the machine": _calls(
        "298, 241, room, 0, -1, -1, 0", _BUFFER, "room[0:8] = (1 | 128 << 32).to_bytes(8, 'little')", "room[40] = 0x63"
    ),
    "have a filter of the own": _calls("317, 277, 2, 0, room", _BUFFER),
    "change the layout of memory": _calls("135, 92, 0x0040000"),
    "show the own memory to others": _calls("157, 167, 4, 1, 0, 0, 0"),
    "lock memory": _calls("151, 230, 1"),
    "run before all others": then_solved("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    "be nicer than nice": then_solved("os.nice(-5)"),
    "use numbers of the x32 table": _calls("0x40000000 + 39, 172"),
    "use numbers of a 32-bit machine": then_solved(
        "assert os.uname().machine == 'x86_64'",
        "room = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
        "room.write(bytes.fromhex('b814000000cd80c3'))",  # getpid by int 0x80
        "code = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(room)))",
        "assert code() > 0",
    ),
    "hide an argument in its upper half": _calls("72, 25, os.pipe()[0], (1 << 32) + 1031, 1 << 16"),
    "load a library into a child": then_solved(
        "shutil.copyfile(_ctypes.__file__, 'own.so')",
        "done = subprocess.run([sys.executable, '-c', ''], env={'LD_PRELOAD': os.path.abspath('own.so')},",
        "                      capture_output=True)",
        "assert not done.stderr",
    ),
    "run a program of the own": then_solved(
        "shutil.copyfile(os.path.realpath(sys.executable), 'mine')",
        "os.chmod('mine', 0o755)",
        "subprocess.run(['./mine', '-c', ''])",
    ),
}
