"""Hostile and careless programs: each has to be refused in one line, which matches a pattern.
`PROCESS` do without `import`: what stops them is the locked process alone. `ANSWER` attack the
training process through the channel. The rest is refused for what it says or returns."""

from __future__ import annotations

ESCAPED = "/tmp/escaped"


def body(*lines: str, inputs: str = "x") -> str:
    """A program of `x` [N, 3] with these lines."""
    return "\n".join([f"def reward({inputs}):", *(f"    {line}" for line in lines), ""])


def gives(expression: str) -> str:
    return body(f"return {expression}")


def tries(*lines: str) -> str:
    """A program with `I` for import and `call` for raw system calls, which must not succeed."""
    return "\n".join(
        [
            "I = __import__",
            "os, sys, ctypes = I('os'), I('sys'), I('ctypes')",
            "def call(*numbers):",
            "    assert ctypes.CDLL(None).syscall(*numbers) >= 0",
            "def reward(x):",
            *(f"    {line}" for line in lines),
            "    return x[:, 0]",
        ]
    )


FINE = gives("torch.exp(-x.norm(dim=-1))")
NO = "not permitted|Too many open files"

FILES = {
    "read a file": ("open('/etc/passwd').read()", NO),
    "write a file": (f"open('{ESCAPED}', 'w').write('x')", NO),
    "list a folder": ("os.listdir('/')", NO),
    "remove a file": ("os.unlink('/etc/hostname')", NO),
    "make a folder": (f"os.mkdir('{ESCAPED}')", NO),
    "status of a file": ("os.stat('/etc/passwd')", NO),
    "change the mode": ("os.chmod('/tmp', 0o777)", NO),
    "change the owner": ("os.chown('/tmp', 0, 0)", NO),
    "rename": (f"os.rename('/etc/hostname', '{ESCAPED}')", NO),
    "symbolic link": (f"os.symlink('/etc/passwd', '{ESCAPED}')", NO),
    "named pipe": (f"os.mkfifo('{ESCAPED}')", NO),
    "truncate": ("os.truncate('/etc/hostname', 0)", NO),
    "own memory as a file": ("open('/proc/self/mem', 'r+b')", NO),
    "the environment of others": ("open('/proc/1/environ').read()", NO),
    "a new module": ("I('sqlite3')", "Error"),
    "torch.save": (f"torch.save(x, '{ESCAPED}')", "Error"),
    "torch.load": ("torch.load('/etc/passwd')", "Error"),
    "torch.from_file": ("torch.from_file('/etc/passwd', size=4)", "Error"),
    "torch.hub": ("torch.hub.load('a/b', 'c')", "Error"),
    "torch's extensions": ("I('torch.utils.cpp_extension')", "Error"),
    "a library": ("torch.ops.load_library('libthread_db.so.1')", "Error"),
    "a library by ctypes": ("ctypes.CDLL('libthread_db.so.1')", "Error"),
    "numpy reads": ("np.fromfile('/etc/passwd')", NO),
    "numpy writes": (f"np.save('{ESCAPED}', x)", NO),
    "an array to a file": (f"x.numpy().tofile('{ESCAPED}')", NO),
    "a mapped file": (f"np.memmap('{ESCAPED}', mode='w+', shape=4)", NO),
    "leave the root": ("os.chroot('/')", NO),
    "change the folder": ("os.chdir('/')", NO),
    "mount": ("assert ctypes.CDLL(None).mount(b'a', b'/tmp', b'tmpfs', 0, 0) == 0", "Assertion"),
    "by way of subclasses": (
        "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
        ".__init__.__globals__['system']('id') == 0 or 1 / 0",
        "ZeroDivision|Error",
    ),
}

NETWORK = {
    "socket": ("I('socket').socket()", NO),
    "unix socket": ("I('socket').socket(1)", NO),
    "raw socket": ("I('socket').socket(2, 3, 1)", NO),
    "pair of sockets": ("I('socket').socketpair()", NO),
    "name look-up": ("I('socket').getaddrinfo('localhost', 80)", "Error"),
    "socket by system call": ("call(41, 2, 1, 0)", "Assertion"),
    "a pipe": ("os.pipe()", NO),
    "memory as a file": ("os.memfd_create('a')", NO),
    "shared memory": ("call(29, 0, 4096, 0o1777)", "Assertion"),
    "message queue": ("call(68, 0, 0o1666)", "Assertion"),
    "keys of the kernel": ("call(250, 0, -3, 1)", "Assertion"),
}

PROCESSES = {
    "fork": ("os.fork()", NO),
    "fork bomb": ("while True: os.fork()", NO),
    "fork by system call": ("call(57)", "Assertion"),
    "clone": ("call(56, 17, 0, 0, 0, 0)", "Assertion"),
    "clone3": ("call(435, 0, 88)", "Assertion"),
    "thread": ("I('_thread').start_new_thread(print, ())", "start new thread"),
    "exec": ("os.execv('/bin/sh', ['sh'])", NO),
    "execveat": ("call(322, -100, b'/bin/sh', 0, 0, 0)", "Assertion"),
    "posix_spawn": ("os.posix_spawn('/bin/sh', ['sh'], {})", NO),
    "system": (f"assert os.system('touch {ESCAPED}') == 0", "Assertion"),
    "subprocess": ("I('subprocess').run(['id'])", "Error"),
    "kill the parent": ("os.kill(os.getppid() or 1, 9)", NO),
    "kill everybody": ("os.kill(-1, 9)", NO),
    "kill a group": ("os.killpg(1, 9)", NO),
    "ptrace": ("assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0", "Assertion"),
    "memory of another process": ("call(310, 1, 0, 0, 0, 0, 0)", "Assertion"),
    "raise the limits": (
        "I('resource').setrlimit(9, (-1, -1))",
        "not permitted|exceeds|not allowed",
    ),
    "become root": ("os.setuid(0)", NO),
    "priority": ("os.nice(-5)", NO),
    "another core": ("os.sched_setaffinity(0, {0})", NO),
    "new namespaces": ("call(272, 0x10000000)", "Assertion"),
    "undo the lock": ("assert ctypes.CDLL(None).prctl(22, 0, 0, 0, 0) == 0", "Assertion"),
    "io_uring": ("call(425, 8, 0)", "Assertion"),
    "bpf": ("call(321, 0, 0, 0)", "Assertion"),
    "userfaultfd": ("call(323, 0)", "Assertion"),
    "handle of a process": ("call(434, 1, 0)", "Assertion"),
    "executable memory": ("I('mmap').mmap(-1, 4096, prot=7)", "not permitted|Error"),
    "make memory executable": (
        "p = I('mmap').mmap(-1, 4096)",
        "a = ctypes.addressof(ctypes.c_char.from_buffer(p))",
        "assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(a), 4096, 7) == 0",
        "Assertion",
    ),
    "another kind of system call": ("call(0x40000000 + 41, 2, 1, 0)", "Assertion"),
    "a timer": ("I('signal').setitimer(0, 1)", NO),
}

TIME = {
    "endless loop": ("while True: pass", "computes longer"),
    "endless loop that catches": (
        "while True:",
        "    try:",
        "        while True: x",
        "    except BaseException: x",
        "computes longer",
    ),
    "big number": ("y = 9**9**9", "computes longer|Memory"),
    "regular expression": ("I('re').match('(a+)+b', 'a' * 64)", "computes longer"),
    "waiting for ever": ("a = I('_thread').allocate_lock(); a.acquire(); a.acquire()", "it waits"),
    "sleep": ("I('time').sleep(100)", "not permitted|it waits"),
}

MEMORY = {
    "memory": ("y = bytearray(1 << 40)", "MemoryError"),
    "memory in torch": ("y = torch.zeros(1 << 36)", "memory"),
    "memory slowly": ("y = []", "while True: y.append(bytearray(1 << 24))", "MemoryError|computes"),
    "mask to the third power": (
        "v = x[:, 0][x[:, 0] > -9].repeat(64)",
        "y = (v[:, None, None] * v[None, :, None] * v[None, None, :]).sum()",
        "memory|computes longer",
    ),
    "recursion": ("f = lambda f: f(f)", "f(f)", "RecursionError|crashed|ended"),
    "huge output": ("print('a' * 10**7, flush=True)", "prints more"),
    "huge error": ("sys.stderr.write('a' * 10**7)", "prints more"),
    "a long reason": ("raise ValueError('a\\n' * 10**6)", "ValueError: a a|computes longer"),
}

FORGED = "os.write(4, I('struct').pack('<II', len(t), {}) + t + b'x' * {}); I('time').sleep"
LARGE = 't = b\'{"arrays": [["float32", [%d, %d]]]}\' % (2**62, 2**62)'
EMPTY, FOUR = FORGED.format(0, 0), FORGED.format(4, 4)
ANSWER = {
    "crash": ("ctypes.string_at(0)", "crashed|ended"),
    "leave": ("os._exit(0)", "ended early"),
    "leave politely": ("raise SystemExit", "ended early"),
    "interrupt": ("raise KeyboardInterrupt", "ended early"),
    "no channel": ("os.close(4); os.close(3)", "ended early|stopped"),
    "forged answer": ("os.write(4, b'x' * 100000)", "too long|cannot be read"),
    "forged length": ("os.write(4, b'\\xff' * 8)", "too long"),
    "forged nesting": ("t = b'[' * 60000", EMPTY, "cannot be read"),
    "forged list": ("t = b'[]'", EMPTY, "cannot be read"),
    "forged shapes": ('t = b\'{"arrays": [["float32", [1e400, -1]]]}\'', EMPTY, "cannot be read"),
    "forged size": (LARGE, EMPTY, "cannot be read|malformed"),
    "forged without names": ("t = b'{\"arrays\": []}'", EMPTY, "another call"),
    "forged names": ('t = b\'{"names": 7, "arrays": [["uint8", [4]]]}\'', FOUR, "another call"),
    "forged reason": (
        't = b\'{"layer": "a\\\\u000ab", "reason": "c\\\\u000ad", "arrays": []}\'',
        EMPTY,
        "c d",
    ),
    "the worker's own code": (
        "sys.modules['__main__'].pack = lambda *a: b'\\xff' * 64",
        "too long",
    ),
    "a memory that was not asked for": (
        "P = sys.modules['__main__'].LoadedProgram",
        "c = P.__call__",
        "P.__call__ = lambda s, a, n: (*c(s, a, n)[:2], [np.zeros((n, 8), np.float32)])",
        "malformed",
    ),
    "the rules' own code": (
        "sys.modules['embodied.sandbox.program'].column = lambda *a, **k: np.zeros(3)",
        "malformed|cannot be read",
    ),
}
NEWER = {
    "openat2": ("call(437, -100, b'/etc/passwd', 0, 24)", "Assertion"),
    "a handle of a file": ("call(303, -100, b'/etc', 0, 0, 0)", "Assertion"),
    "shared memory of POSIX": ("open('/dev/shm/escaped', 'w')", NO),
    "shared memory of Python": (
        "I('multiprocessing.shared_memory', fromlist=['a']).SharedMemory(create=True, size=8)",
        "Error|not permitted",
    ),
    "shared memory of torch": ("x.share_memory_()", "Error|not permitted"),
    "processes of torch": (
        "I('torch.multiprocessing', fromlist=['a']).Process(target=print).start()",
        "Error|not permitted",
    ),
    "a pool": (
        "I('concurrent.futures', fromlist=['a']).ThreadPoolExecutor(1).submit(print).result()",
        "thread|Error",
    ),
    "a compiled module of torch": ("torch.jit.load('/etc/passwd')", "Error"),
    "a C compiler": (
        "torch.compile(lambda y: y + 1, fullgraph=True)(x); assert False, 'compiled'",
        "Error",
    ),
    "a pickle from a file": ("np.load('/etc/passwd', allow_pickle=True)", NO),
    "a pickle that runs": (
        "I('pickle').loads(b\"cos\\nsystem\\n(S'touch /tmp/escaped'\\ntR.\"); 1 / 0",
        "ZeroDivision|Error",
    ),
    "a profile of the caller": (
        "sys.setprofile(lambda *a: os.write(4, b'x' * 9))",
        "too long|cannot be read|ended|another|stopped",
    ),
    "a trace of the caller": (
        "sys.settrace(lambda *a: 1 / 0)",
        "Error|ended|cannot be read|another",
    ),
    "an end by the exit of all": ("I('atexit').register(print); sys.exit(3)", "ended early"),
    "a signal to itself": ("I('signal').raise_signal(9)", "ended|crashed|not permitted"),
    "stop itself": ("os.kill(os.getpid(), 19)", NO),
    "a copy of the channel": ("os.dup2(1, 4)", NO),
    "a channel that never blocks": ("I('fcntl').fcntl(3, 4, 2048)", "not permitted|Error|ended"),
    "a pipe into a pipe": ("call(275, 3, 0, 4, 0, 100, 0)", "Assertion"),
    "send a file": ("call(40, 4, 3, 0, 100)", "Assertion"),
    "a directory by number": ("os.listdir(3)", NO),
    "the command line of others": ("open('/proc/self/cmdline')", NO),
    "its own descriptors": ("os.readlink('/proc/self/fd/0')", NO),
    "extended attributes": ("os.setxattr('/tmp', 'user.a', b'b')", NO),
    "a hard link": (f"os.link('/etc/passwd', '{ESCAPED}')", NO),
    "a device": (f"os.mknod('{ESCAPED}', 0o20666, 259)", NO),
    "a sparse file": (f"os.truncate('{ESCAPED}', 1 << 40)", NO),
    "the clock": ("call(227, 0, 0)", "Assertion"),
    "reboot": ("call(169, 0xfee1dead, 672274793, 0, 0)", "Assertion"),
    "a module of the kernel": ("call(175, 0, 0, 0)", "Assertion"),
    "perf": ("call(298, 0, 0, -1, -1, 0)", "Assertion"),
    "a personality without protection": ("call(135, 0x0040000)", "Assertion"),
    "its own memory protection": (
        "call(329, x.data_ptr() // 4096 * 4096, 4096, 7, 0)",
        "Assertion",
    ),
    "a remapped page": (
        "call(25, x.data_ptr() // 4096 * 4096, 4096, 1 << 45, 1, 0)",
        "Assertion|crashed|ended",
    ),
    "write into torch": ("ctypes.memset(ctypes.pythonapi.Py_IsInitialized, 0, 8)", "crashed|ended"),
    "a flood of answers": (
        "[os.write(4, b'\\0' * 8) for _ in range(10**6)]",
        "another call|cannot be read|too long|malformed",
    ),
    "half an answer": (
        "os.write(4, I('struct').pack('<II', 100, 100) + b'x'); I('time').sleep",
        "ended|cannot|too long|computes|waits|another|stopped|malformed",
    ),
    "forged kind of numbers": (
        't = b\'{"arrays": [["object", [4]]]}\'',
        FOUR,
        "cannot be read|malformed|another",
    ),
    "forged complex": (
        't = b\'{"arrays": [["complex128", [4]]]}\'',
        FORGED.format(64, 64),
        "cannot be read|malformed|another",
    ),
    "forged negative": (
        't = b\'{"arrays": [["float32", [-4]]]}\'',
        FOUR,
        "cannot be read|malformed|another",
    ),
    "forged many names": (
        't = b\'{"names": [\' + b\'"a",\' * 9999 + b\'"a"], "arrays": []}\'',
        EMPTY,
        "another call|cannot|malformed|too long",
    ),
    "forged text": ("t = b'\\xff\\xfe{}'", EMPTY, "cannot be read"),
    "a decompressed bomb": (
        "y = I('zlib').decompress(I('zlib').compress(bytes(10**6)) * 1, bufsize=1 << 33)",
        "Memory|Error",
    ),
    "an object that lives on": (
        "class A:\n        def __del__(self):\n            while True: pass",
        "A()",
        "computes longer",
    ),
}
PROCESS = {**FILES, **NETWORK, **PROCESSES, **TIME, **MEMORY, **ANSWER, **NEWER}
"""Lines for `tries`, and last the pattern."""

OTHER = {
    "too long": ("#" * 20_000 + "\n" + FINE, "at most 16384"),
    "right-to-left override": (FINE + "# \u202e\n", "control characters"),
    "null byte": (FINE + "\0", "control characters"),
    "nested brackets": (gives("(" * 5000 + "x" + ")" * 5000), "32 deep"),
    "run of minus signs": (gives("-" * 5000 + "x[:, 0]"), "run of signs"),
    "run of nots": (gives("not " * 3000 + "x"), "run of signs"),
    "power chain": (gives("2" + "**2" * 4000), "parse|nested|recursion"),
    "attribute chain": (gives("x" + ".a" * 7000), "parse|nested|Error|crashed|ended"),
    "ten thousand digits": (gives("x[:, 0] * " + "9" * 10_000), "digits"),
    "indentation": ("".join(" " * i + "if x:\n" for i in range(150)), "indentation"),
    "prose": ("Here is your reward function, it is very good.", "syntax"),
    "truncated": ("def reward(x):\n    return torch.exp(", "never closed"),
    "import os": ("import os\n" + gives("x[:, 0] + os.getpid()"), "line 1: os cannot be imported"),
    "import inside": (
        body("from os import system", "return system('true') + x[:, 0]"),
        "line 2: os cannot be imported",
    ),
    "relative import": ("from . import lock\n" + gives("lock(x)"), "cannot be imported"),
    "import for an attempt": (
        "try:\n    from os import system\nfinally:\n    system('true')\n" + FINE,
        "NameError|os is not there",
    ),
    "import at load": ("__import__('os').listdir('/')\n" + FINE, NO),
    "decorator": ("@__import__('os').listdir\n" + FINE, "Error"),
    "default argument": ("def reward(x, y=open('/etc/passwd')):\n    return x[:, 0]\n", NO),
    "loop at load": ("while True: pass\n" + FINE, "computes longer"),
    "asks for success": (body("return success.float()", inputs="x, success"), "asks for success"),
    "asks for the environment": (body("return x[:, 0]", inputs="x, env"), "asks for env"),
    "self has no environment": ("def reward(self):\n    return self.env.r", "no self.env"),
    "nothing": ("", "no function reward"),
    "NaN": (gives("torch.log(x[:, 0] * 0 - 1)"), "is nan in 64 of 64"),
    "infinite": (gives("x[:, 0] / (x[:, 0] - x[:, 0])"), "inf"),
    "infinite component": (body("return x[:, 0], {'a': torch.log(x[:, 0] * 0)}"), "a is -inf"),
    "too large": (gives("x[:, 0] * 1000000.0"), "at most 1000"),
    "wrong shape": (gives("x"), r"shape \[16, 3\]; it should be \[16\]"),
    "a dict": (gives("{'a': x[:, 0]}"), "the reward is dict"),
    "three values": (body("return x[:, 0], {'a': x[:, 0]}, x"), "returns 3 values"),
    "a memory that is not returned": (
        body("return memory[:, 0], {}", inputs="x, memory"),
        "returns 2 values; return total, components, memory",
    ),
    "a memory of another shape": (
        body("return x[:, 0], {}, x", inputs="x, memory"),
        r"the memory has shape \[64, 3\]; it should be \[64, 8\]",
    ),
    "a memory of text": (body("return x[:, 0], {}, 'a lot'", inputs="x, memory"), "memory is str"),
    "a memory that is not finite": (
        body("return x[:, 0], {}, memory / 0", inputs="x, memory"),
        "the memory is nan in 64 of 64",
    ),
    "a memory of other transitions": (
        body("return x[:, 0], {}, memory + x.sum()", inputs="x, memory"),
        "depends on other",
    ),
    "a random memory": (
        body("return x[:, 0], {}, torch.rand(len(x), 8)", inputs="x, memory"),
        "differently",
    ),
    "a memory that depends on calls": (
        "n = [0]\n" + body("n[0] += 1", "return x[:, 0], {}, memory + n[0]", inputs="x, memory"),
        "differently",
    ),
    "the memory of others in the reward": (
        body("return memory.sum() + x[:, 0], {}, x.repeat(1, 3)[:, :8]", inputs="x, memory"),
        "depends on other",
    ),
    "text": (gives("'a lot'"), "the reward is str"),
    "complex": (gives("x[:, 0] * 1j"), "complex"),
    "no return": ("def reward(x):\n    y = x\n", "NoneType"),
    "depends on others": (gives("x[:, 0] - x[:, 0].mean()"), "depends on other"),
    "first row": (gives("x[0, 0] + 0 * x[:, 0]"), "depends on other"),
    "random": (gives("torch.rand(len(x))"), "differently"),
    "counts its calls": ("n = [0]\n" + body("n[0] += 1", "return x[:, 0] * n[0]"), "differently"),
    "slow per transition": (
        body(
            "for i in range(200): x.norm(dim=-1).sum().item()", "return float(x.sum())", inputs="x"
        ),
        "microseconds|computes longer",
    ),
    "sparse": (gives("x[:, 0].to_sparse()"), "no plain float32"),
    "meta": (gives("x[:, 0].to('meta')"), "no plain float32"),
    "masked": (gives("np.ma.masked_less(x[:, 0].numpy(), 0)"), "no attribute 'numpy'"),
    "objects": (gives("np.array([object()] * len(x))"), "is object"),
    "texts": (gives("np.array(['a'] * len(x))"), "<U1"),
    "dates": (gives("np.zeros(len(x), 'datetime64[s]')"), "datetime64"),
    "a generator": (gives("(float(v) for v in x[:, 0])"), "generator, not a tensor"),
    "id": (gives("x[:, 0] * 0 + id(x) % 97"), r"id\(\) differs from process to process"),
    "hash": (gives("x[:, 0] * 0 + hash('x') % 97"), r"hash\(\) differs from process to process"),
    "the time": (
        body("import time", "return x[:, 0] + time.time() % 1"),
        "time cannot be imported",
    ),
    "the size of the batch": (gives("x[:, 0] * len(x)"), "depends"),
    "sorted": (gives("x[:, 0].sort().values"), "depends"),
    "cumulative": (gives("x[:, 0].cumsum(0)"), "depends"),
    "normalised": (
        gives("(x[:, 0] - x[:, 0].min()) / (x[:, 0].max() - x[:, 0].min() + 1)"),
        "depends on other",
    ),
    "the row before": (gives("x[:, 0] - x[:, 0].roll(1)"), "depends"),
    "patched torch": (
        body(
            "torch.Tensor.__len__ = lambda s: 0",
            "torch.isfinite = lambda y: torch.ones(9) > 0",
            "return x[:, 0] / 0",
        ),
        "-inf|inf in",
    ),
    "surrogates": (FINE + "# \ud800\n", "control characters"),
    "async": ("async def reward(x):\n    return x[:, 0]\n", "no function reward"),
    "generator function": ("def reward(x):\n    yield x[:, 0]\n", "generator, not a tensor"),
    "a class that is called": (
        "class reward:\n    def __new__(cls, x):\n        return x[:, 0]\n",
        "no function reward",
    ),
    "star": ("def reward(*x):\n    return x[0][:, 0]\n", "IndexError"),
    "two rewards": (FINE + "reward = 7\n", "not callable"),
}
"""Whole programs, and the pattern."""
