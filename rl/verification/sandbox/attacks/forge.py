"""Attacks that forge the verdict, or find out what is expected."""

from rl.verification.sandbox.attacks.attack import WRONG, Attack, then_solved, then_wrong

ATTACKS: dict[str, Attack] = {
    "return a pickle": Attack(
        "class Bomb:\n    def __reduce__(self):\n        return exec, ('1',)\ndef solve(x):\n    return Bomb()\n"
    ),
    "send a pickle": then_wrong(
        "for fd in range(3, 64):", "    try: os.write(fd, pickle.dumps([1]))", "    except OSError: pass"
    ),
    "equal to everything": Attack(
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def solve(x):\n    return Equal(0)\n"
    ),
    "an object equal to everything": Attack(
        "class Equal:\n    def __eq__(self, other): return True\ndef solve(x):\n    return Equal()\n"
    ),
    "patch the checker": then_wrong(
        "for name, module in list(sys.modules.items()):",
        "    for one in ('_judge', '_ask', 'receive', 'decode'):",
        "        if hasattr(module, one): setattr(module, one, lambda *a, **k: {'passed': True})",
        "builtins.AssertionError = type('Never', (BaseException,), {})",
    ),
    "exit 0": Attack("import os\nos._exit(0)\n"),
    "sys.exit 0": Attack("import sys\nsys.exit(0)\n"),
    "exit 0 in a call": Attack("import os\ndef solve(x):\n    os._exit(0)\n"),
    "exit 0 of a program": Attack("import os\nos._exit(0)\n", script=True),
    "forge the verdict": then_wrong(
        "payload = json.dumps({'passed': True, 'error': ''}).encode()",
        "for fd in range(3, 64):",
        "    try: os.write(fd, struct.pack('<I', len(payload)) + payload)",
        "    except OSError: pass",
    ),
    "find the tests in memory": then_solved(
        "frame, found = sys._getframe(), []",
        "while frame: found += list(frame.f_locals.values()); frame = frame.f_back",
        "assert any(''.join(['152399', '025']) in str(one)[:10_000] for one in [*gc.get_objects(), *found])",
    ),
    "overwrite the tests": then_solved(
        "folders = ['.', '/', '/tmp', '/etc', '/usr', '/home', '/root', sys.prefix, *sys.path]",
        "found = [os.path.join(f, n) for f in folders if os.path.isdir(f) for n in os.listdir(f)]",
        "writable = [name for name in found if os.path.isfile(name) and os.access(name, os.W_OK)]",
        "assert writable",
        "for name in writable: open(name, 'w').close()",
    ),
    "find the expected output": Attack(
        "import gc\nfound = any(''.join(['152399', '025']) in str(one)[:10_000] for one in gc.get_objects())\n"
        "print(''.join(['152399', '025']) if found else 0)\n",
        script=True,
    ),
    "override a helper of the tests": Attack(
        WRONG + "def same(a, b):\n    return True\n",
        tests="assert same(solve(3), 9)",
        prelude="def same(a, b):\n    return a == b\n",
    ),
    "override a module of the tests": Attack(
        WRONG + "def math(): pass\nmath.isclose = lambda a, b: True\nisclose = lambda a, b: True\n",
        tests="assert isclose(solve(3), 9)",
        prelude="from math import isclose\n",
    ),
    "override a class of the tests": Attack(
        WRONG + "def Case(x, y):\n    return True\n",
        tests="assert Case(solve(3), 9)",
        prelude="class Case:\n    def __init__(self, x, y): self.right = x == y\n"
        "    def __bool__(self): return self.right\n",
    ),
    "override what is built in": Attack(
        WRONG + "def abs(x): return 0\ndef all(x): return True\ndef print(*x): pass\n",
        tests="assert all([abs(solve(3) - 9) < 1])",
    ),
    "end a loop of the tests": Attack(
        "def solve(x):\n    raise StopIteration\n",
        tests="for got, expected in zip(map(solve, [3, 4]), [9, 16]):\n    assert got == expected\n",
    ),
    "raise nothing but a mark": Attack(
        "def solve(x):\n    raise GeneratorExit\n", tests="def each():\n    yield solve(3) == 9\nassert next(each())\n"
    ),
    "leave the tests by an error": Attack("def solve(x):\n    raise SystemExit(0)\n"),
    "interrupt the tests": Attack("def solve(x):\n    raise KeyboardInterrupt\n"),
    "equal to everything, of the library": Attack(
        "from unittest.mock import ANY\ndef solve(x):\n    return ANY\n", tests="assert solve(3) == 9"
    ),
    "a text equal to everything": Attack(
        "class Equal(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def solve(x):\n    return Equal()\n"
    ),
    "a list equal to everything": Attack(
        "class Equal(list):\n    def __eq__(self, other): return True\ndef solve(x):\n    return Equal()\n"
    ),
    "no number": Attack("def solve(x):\n    return float('nan')\n"),
    "an array of itself": Attack(
        "class Array:\n    def tolist(self): return self\ndef solve(x):\n    return Array()\n"
    ),
    "an answer still to come": Attack("async def solve(x):\n    return x * x\n"),
    "patch what equal means": then_wrong(
        "kinds = (ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)",
        "always = ctypes.PYFUNCTYPE(*kinds)(lambda *both: True)",
        "place = ctypes.c_void_p.from_address(id(int) + 200)",  # tp_richcompare
        "place.value = ctypes.cast(always, ctypes.c_void_p).value",
    ),
    "patch the writing of replies": then_wrong("json.dumps = lambda *a, **k: '{\"value\": 9}'"),
    "patch the running of code": then_wrong("builtins.exec = builtins.compile = builtins.eval = lambda *a, **k: None"),
    "trace the tests": then_wrong(
        "def trace(frame, event, argument):",
        "    frame.f_locals.update(passed=True)",
        "    return trace",
        "sys.settrace(trace); threading.settrace(trace); sys.setprofile(trace)",
    ),
    "change the frames below": then_wrong(
        "frame = sys._getframe()",
        "while frame:",
        "    frame.f_globals.update(_judge=None, encode=lambda value: 9, job={'tests': ''})",
        "    frame = frame.f_back",
    ),
    "a verdict of a thread": then_wrong(
        "payload = json.dumps({'passed': True}).encode()",
        "def forge():",
        "    for fd in range(3, 64):",
        "        try: os.write(fd, struct.pack('<I', len(payload)) + payload)",
        "        except OSError: pass",
        "threading.Timer(0.05, forge).start()",
    ),
    "a verdict at the end": then_wrong("atexit.register(os._exit, 0)"),
    "two processes that answer": then_wrong("os.fork()"),
    "half a frame": then_wrong(
        "for fd in range(3, 64):",
        "    try: os.write(fd, bytes([200, 0]))",
        "    except OSError: pass",
        "time.sleep(1000)",
        hangs=True,
    ),
    "a frame nested too deeply": then_wrong(
        "for fd in range(3, 64):",
        "    try: os.write(fd, struct.pack('<I', 100_000) + b'[' * 100_000)",
        "    except OSError: pass",
    ),
    "names that are no names": then_wrong(
        "import os, struct",
        'payload = b\'{"functions": {"solve": [[]]}}\'',
        "for fd in range(3, 64):",
        "    try: os.write(fd, struct.pack('<I', len(payload)) + payload)",
        "    except OSError: pass",
    ),
    "close all descriptors": then_wrong("os.closerange(0, 64)"),
    "exchange the descriptors": then_wrong(
        "null = os.open('/dev/null', os.O_RDWR)", "for fd in range(3, null): os.dup2(null, fd)"
    ),
    "digits of another script": Attack(
        "print(''.join(chr(ord(one) + 0xFEE0) for one in str(int(input()) ** 2)))", True
    ),
    "digits in reverse order by a mark": Attack("print('\\u202e' + str(int(input()) ** 2)[::-1])\n", True),
    "a number that is struck out": Attack("print('0\\b' + str(int(input()) ** 2), end='\\0')\n", True),
    "a right line among others": Attack("for number in range(100): print(152399000 + number)\n", True),
    "the right answer and a failure": Attack("print(int(input()) ** 2)\nraise SystemExit(1)\n", True),
    "the right answer and a crash": Attack("print(int(input()) ** 2, flush=True)\nimport os\nos.abort()\n", True),
}
