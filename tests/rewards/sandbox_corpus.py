"""Escapes and abuses: each with the layer of the sandbox that has to stop it.

`ATTACKS` go through all layers; `RAW` are plain Python for the locked process alone, with a word of
the reason that it has to give.
"""

from __future__ import annotations


def body(*lines: str, inputs: str = "x") -> str:
    """A program of `x` [N, 3] with these lines."""
    return "\n".join([f"def reward({inputs}):", *(f"    {line}" for line in lines), ""])


def gives(expression: str) -> str:
    return body(f"return {expression}")


FINE = gives("torch.exp(-x.norm(dim=-1))")
HANDED = "return x[:, 0]"

SOURCE = {
    "too long": "#" * 20_000 + "\n" + FINE,
    "homoglyph name": FINE.replace("exp", "\u0435xp"),
    "full-width letters": FINE.replace("norm", "\uff4eorm"),
    "right-to-left override": FINE + "# \u202e\n",
    "null byte": FINE + "\0",
    "nested brackets bomb": gives("(" * 5000 + "x" + ")" * 5000),
    "nested subscripts bomb": gives("x" + "[" * 4000 + "0" + "]" * 4000),
    "run of minus signs": gives("-" * 5000 + "x[:, 0]"),
    "run of nots": gives("not " * 3000 + "x"),
}

SYNTAX = {
    "truncated": "def reward(x):\n    return torch.exp(",
    "prose": "Here is your reward function, it is very good.",
    "power chain": gives("2" + "**2" * 4000),
    "number of ten thousand digits": gives("x[:, 0] * " + "9" * 10_000),
    "yield outside": "yield 3\n" + FINE + "    return (\n",
    "indentation bomb": "".join(" " * i + "if x:\n" for i in range(150)),
    "shell": "#!/bin/sh\nrm -rf /\n",
}

LANGUAGE = {
    "import os": "import os\n" + FINE,
    "import inside": body("import os", HANDED),
    "from import": "from os import system\n" + FINE,
    "__import__": gives("__import__('os').system('id')"),
    "subclasses walk": gives("().__class__.__base__.__subclasses__()"),
    "subclasses of a tensor": gives("x.__class__.__mro__[1].__subclasses__()"),
    "globals of a function": gives("reward.__globals__"),
    "code of a function": body("reward.__code__ = 0", HANDED),
    "module dictionary": gives("torch.__dict__"),
    "builtins by getattr": gives("getattr(torch, 'load')('/etc/passwd')"),
    "vars": gives("vars(torch)"),
    "eval": gives("eval('1')"),
    "exec": body("exec('import os')", HANDED),
    "compile": gives("compile('1', 'a', 'eval')"),
    "open": gives("open('/etc/passwd').read()"),
    "breakpoint": body("breakpoint()", HANDED),
    "input": body("input()", HANDED),
    "print": body("print(x)", HANDED),
    "help": body("help()", HANDED),
    "exit": body("exit()", HANDED),
    "format string attribute": gives("'{0.__class__}'.format(x)"),
    "f-string": gives("f'{x.__class__}'"),
    "percent string": gives("'%s' % x"),
    "string multiplied": gives("'a' * 100000"),
    "bytes": gives("b'a'"),
    "generator frame": gives("(i for i in range(3)).gi_frame.f_back.f_globals"),
    "coroutine": "async def reward(x):\n    return x[:, 0]\n",
    "yield": body("yield x[:, 0]", HANDED),
    "lambda": gives("(lambda: x[:, 0])()"),
    "class": "class A:\n    pass\n" + FINE,
    "metaclass keyword": "class A(metaclass=type):\n    x = 1\n" + FINE,
    "decorator": "@torch.jit.script\n" + FINE,
    "decorator payload": "@__import__('os').system\n" + FINE,
    "default argument": "def reward(x, y=__import__('os')):\n    return x[:, 0]\n",
    "annotation payload": "def reward(x: __import__('os').system('id')):\n    return x[:, 0]\n",
    "return annotation payload": "def reward(x) -> exit():\n    return x[:, 0]\n",
    "star parameter": "def reward(*x):\n    return x[0]\n",
    "keyword-only": "def reward(*, x):\n    return x[:, 0]\n",
    "nested function": body("def f():", "    return x", HANDED),
    "function as a value": body("f = torch.exp", "return f(x[:, 0])"),
    "own function as a value": "def g(x):\n    return x\n" + body("f = g", HANDED),
    "recursion": gives("reward(x)"),
    "mutual recursion": "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n" + gives("f(x)"),
    "while": body("while True:", "    x = x", HANDED),
    "for over data": body("for row in x:", "    y = row", HANDED),
    "long range": body("for i in range(1000000):", "    y = x", HANDED),
    "range of a name": body("n = 5", "for i in range(n):", "    y = x", HANDED),
    "loops three deep": body(
        "for i in range(64):",
        "    for j in range(64):",
        "        for k in range(64):",
        "            y = x",
        HANDED,
    ),
    "comprehension over data": gives("torch.stack([row for row in x])"),
    "comprehension with a condition": gives("torch.stack([x for i in range(3) if x])"),
    "set": gives("{1, 2}"),
    "try": body("try:", "    y = x", "except:", "    pass", HANDED),
    "raise": body("raise x", HANDED),
    "with": body("with x:", "    y = x", HANDED),
    "del": body("del x", "return 1"),
    "global": body("global x", HANDED),
    "assert": body("assert x", HANDED),
    "walrus": gives("(y := x[:, 0])"),
    "match": body("match x:", "    case _:", "        y = x", HANDED),
    "if on data": body("if x:", "    y = x", HANDED),
    "power of powers": gives("x[:, 0] + 9**9**9"),
    "large exponent": gives("x[:, 0] ** 1000"),
    "exponent by name": body("n = 8", "return x[:, 0] ** n"),
    "large number": gives("x[:, 0] * 1e300"),
    "shift bomb": gives("x[:, 0] + (1 << 1000000)"),
    "imaginary": gives("x[:, 0] * 1j"),
    "torch.from_file": gives("torch.from_file('/etc/passwd', size=10)"),
    "torch.save": body("torch.save(x, '/work/x')", HANDED),
    "torch.load": gives("torch.load('/etc/passwd')"),
    "torch.hub": gives("torch.hub.load('a', 'b')"),
    "torch.ops": gives("torch.ops.aten.exp(x)"),
    "torch.classes": gives("torch.classes.load_library('a.so')"),
    "torch.utils": gives("torch.utils.cpp_extension.load('a', 'b')"),
    "torch.distributed": gives("torch.distributed.rpc.rpc_sync(x)"),
    "torch's os": gives("torch.os.system('id')"),
    "torch's sys": gives("torch.sys.modules"),
    "numpy ctypes": gives("np.ctypeslib.load_library('libc', '.')"),
    "numpy load": gives("np.load('a.npy', allow_pickle=True)"),
    "numpy's file writer": body("x.numpy().tofile('/work/x')", HANDED),
    "data_ptr": gives("x.data_ptr()"),
    "storage": gives("x.untyped_storage()"),
    "apply": gives("x.apply_(exit)"),
    "register_hook": gives("x.register_hook(exit)"),
    "item": gives("x[0, 0].item()"),
    "tolist": gives("x.tolist()"),
    "shape": gives("torch.zeros(x.shape[0])"),
    "to a device": gives("x.to('cuda')"),
    "huge allocation": gives("torch.zeros(1000000, 1000000)"),
    "huge range": gives("torch.arange(1000000000)"),
    "expand bomb": gives("x.expand(100000, 100000, 3)"),
    "repeat bomb": gives("x.repeat(100000, 100000)"),
    "einsum bomb": gives("torch.einsum('a,b,c,d->abcd', x, x, x, x)"),
    "matmul": gives("x @ x"),
    "in-place slice": body("x[:, 0] = 0", HANDED),
    "in-place everything": body("x[:] = 0", HANDED),
    "in-place on an element": body("x[0] += 1", HANDED),
    "copy_": body("y = x.copy_(x)", HANDED),
    "zero_": gives("x.zero_()"),
    "out keyword": gives("torch.exp(x, out=x)"),
    "attribute written": body("x.data = x", HANDED),
    "random": gives("torch.rand(3)"),
    "random like": gives("torch.rand_like(x)[:, 0]"),
    "seeding": body("y = torch.manual_seed(0)", HANDED),
    "numpy random": gives("np.random.rand(3)"),
    "threads": body("y = torch.set_num_threads(64)", HANDED),
    "time": gives("time.time()"),
    "sleep": body("y = time.sleep(100)", HANDED),
    "starred call": gives("torch.maximum(*x)"),
    "keyword stars": gives("torch.exp(**x)"),
    "underscore name": body("_f_exp = x", HANDED),
    "our own names": gives("_f_range(10)"),
    "torch replaced": body("torch = x", HANDED),
    "chained comparison": gives("(0 < x[:, 0] < 1).float()"),
    "list grows": body("a = [x]", "return a"),
    "no return": "def reward(x):\n    y = x\n",
    "nine functions": "".join(f"def f{i}(x):\n    return x\n" for i in range(8)) + FINE,
    "one huge function": body(*(f"a{i} = x * {i} + x" for i in range(300)), HANDED),
    "numbers from True": gives("x[:, 0] * (True + True)"),
    "very long name": gives("a" * 15_000),
    "string as an argument": gives("x.norm(p='nuc')"),
    "counter written": body("for i in range(3):", "    i = 9", HANDED),
    "long sum": gives("+".join(["x[:, 0]"] * 2000)),
    "code outside": "reward = 5\nx = torch.exp(1)\n" + FINE,
    "expression outside": "torch.hub.load('a', 'b')\n" + FINE,
    "unknown name": gives("x[:, 0] * os"),
}

SIGNATURE = {
    "wrong name": "def compute_reward(x):\n    return x[:, 0]\n",
    "asks for success": body("return success.float()", inputs="x, success"),
    "asks for the environment": body(HANDED, inputs="x, env"),
    "self": body(HANDED, inputs="self, x"),
    "nothing": "",
}

PROCESS = {
    "slow by nested calls": "".join(
        [
            "def a(x):\n    for i in range(64):\n        for j in range(64):\n",
            "            x = x * 1.0\n    return x\n",
            *(
                f"def {name}(x):\n    for i in range(64):\n        for j in range(64):\n"
                f"            x = {called}(x)\n    return x\n"
                for name, called in (("b", "a"), ("c", "b"))
            ),
            gives("c(x[:, 0])"),
        ]
    ),
    "exponential comparison": body(
        "d = {'a': 1}",
        "e = {'a': 1}",
        "for i in range(60):",
        "    d = {'a': d, 'b': d}",
        "    e = {'a': e, 'b': e}",
        "return x[:, 0] * (d == e)",
    ),
}

RESULT = {
    "NaN": gives("torch.log(x[:, 0] * 0 - 1)"),
    "infinite": gives("x[:, 0] / (x[:, 0] - x[:, 0])"),
    "infinite component": body("return x[:, 0], {'a': torch.log(x[:, 0] * 0)}"),
    "too large": gives("x[:, 0] * 1000000.0"),
    "wrong shape": gives("x"),
    "a scalar": gives("x.sum()"),
    "a number": gives("1.0"),
    "a dict": gives("{'a': x[:, 0]}"),
    "three values": body("return x[:, 0], {'a': x[:, 0]}, x"),
    "components in a tuple": body("return x[:, 0], x[:, 0]"),
    "wrong component": body("return x[:, 0], {'a': x}"),
    "depends on other rows": gives("x[:, 0] - x[:, 0].mean()"),
    "first row": gives("x[0, 0] + 0 * x[:, 0]"),
    "index out of range": gives("x[:, 7]"),
    "counter after its loop": body("for i in range(3):", "    y = x", "return x[:, 0] * i"),
    "not assigned": body("y = y + x[:, 0]", "return y"),
    "memory by broadcasting": gives(
        "x[:, 0] + 0 * (x[:, 0][:, None, None, None] * x[:, 0][None, :, None, None]"
        " * x[:, 0][None, None, :, None] * x[:, 0][None, None, None, :]).sum()"
    ),
}

ATTACKS = {
    "source": SOURCE,
    "syntax": SYNTAX,
    "language": LANGUAGE,
    "signature": SIGNATURE,
    "process": PROCESS,
    "result": RESULT,
}

# Plain Python in the locked process: what the system refuses is an error there, what takes too
# long, too much or kills is stopped from outside.
RAW = {
    "read a file": ("open('/etc/passwd').read()", "not permitted|Too many open files"),
    "write a file": ("open('/tmp/escaped', 'w').write('x')", "not permitted|Too many open files"),
    "list a folder": ("import os; os.listdir('/')", "not permitted|Too many open files"),
    "remove a file": ("import os; os.unlink('/etc/hostname')", "not permitted"),
    "make a folder": ("import os; os.mkdir('/tmp/escaped')", "not permitted"),
    "status of a file": ("import os; os.stat('/etc/passwd')", "not permitted"),
    "change the mode": ("import os; os.chmod('/tmp', 0o777)", "not permitted"),
    "import a new module": ("import sqlite3", "Error"),
    "torch.save": ("import torch; torch.save(x, '/tmp/escaped')", "Error"),
    "torch.from_file": ("import torch; torch.from_file('/etc/passwd', size=4)", "Error"),
    "numpy to a file": ("x.numpy().tofile('/tmp/escaped')", "not permitted|Too many open files"),
    "socket": ("import socket; socket.socket()", "not permitted|Too many open files"),
    "unix socket": ("import socket; socket.socket(socket.AF_UNIX)", "not permitted|Too many"),
    "pair of sockets": ("import socket; socket.socketpair()", "not permitted|Too many"),
    "fork": ("import os; os.fork()", "not permitted"),
    "fork bomb": ("import os\n    while True: os.fork()", "not permitted"),
    "thread": ("import threading; threading.Thread(target=print).start()", "start new thread"),
    "exec": ("import os; os.execv('/bin/sh', ['sh'])", "not permitted"),
    "system": ("import os\n    assert os.system('touch /tmp/escaped') == 0", "AssertionError"),
    "subprocess": ("import subprocess; subprocess.run(['id'])", "Error"),
    "kill the parent": ("import os; os.kill(os.getppid() or 1, 9)", "not permitted"),
    "kill everybody": ("import os; os.kill(-1, 9)", "not permitted"),
    "pipe": ("import os; os.pipe()", "not permitted|Too many open files"),
    "raise the limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
        "not permitted|not allowed|exceeds",
    ),
    "become root": ("import os; os.setuid(0)", "not permitted"),
    "ctypes system call": (
        "import ctypes; assert ctypes.CDLL(None).syscall(41, 2, 1, 0) >= 0",
        "AssertionError",
    ),
    "executable memory": ("import mmap; mmap.mmap(-1, 4096, prot=7)", "not permitted|Error"),
    "ptrace": ("import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0", "AssertionError"),
    "sleep": ("import time; time.sleep(100)", "not permitted|no answer"),
    "endless loop": ("while True: pass", "no answer|computes longer"),
    "endless loop that catches": (
        "while True:\n        try:\n            while True: x\n        except BaseException: x",
        "no answer|computes longer",
    ),
    "big number": ("y = 9**9**9", "no answer|computes longer|Memory"),
    "memory": ("y = bytearray(1 << 40)", "MemoryError"),
    "memory in torch": ("import torch; y = torch.zeros(1 << 36)", "memory"),
    "memory slowly": (
        "y = []\n    while True: y.append(bytearray(1 << 24))",
        "MemoryError|no answer",
    ),
    "recursion": ("f = lambda f: f(f)\n    f(f)", "RecursionError|crashed|ended"),
    "huge output": ("print('a' * 10**7, flush=True)", "prints more"),
    "crash": ("import ctypes; ctypes.string_at(0)", "crashed|ended"),
    "leave": ("import os; os._exit(0)", "ended early"),
    "leave politely": ("raise SystemExit", "ended early"),
    "forged answer": ("import os; os.write(4, b'x' * 100000)", "too long|malformed|cannot be read"),
    "forged length": ("import os; os.write(4, b'\\xff' * 8)", "too long"),
}
