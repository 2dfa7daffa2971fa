"""The sandbox's own process: it sets limits, then runs an unknown program.

It is started by its path, without the project: `python -I -S inside.py TOKEN_FD VERDICT_FD BYTES
SECONDS`, with the program on stdin. It writes the token to VERDICT_FD if the program reaches its
end, else the kind of exception.
"""

import ctypes
import os
import resource
import sys

FILE_BYTES = 1 << 24
OPEN_FILES = 64
NOBODY = 65534
# <linux/prctl.h>, <linux/capability.h>
KEEP_CAPABILITIES = 8
NO_NEW_PRIVILEGES = 38
CAPABILITY_VERSION = 0x20080522
READ_ALL = 1 << 2


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process for good: no child processes, and no right to raise a limit again."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    is_root = os.geteuid() == 0
    if is_root:  # the limit on processes does not bind root
        libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # Root keeps the right to read all files, since the interpreter's library may be in its home;
    # all other capabilities are dropped.
    kept = READ_ALL if is_root else 0
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def main() -> None:
    """Run the program on stdin within the limits of the command line."""
    token, verdict, memory_bytes, cpu_s = map(int, sys.argv[1:5])
    program = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the program finds its stdin empty
    sys.argv = ["program"]
    confine(memory_bytes, cpu_s)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        word = os.read(token, 64)
    except BaseException as error:
        word = type(error).__name__.encode()
    os.write(verdict, word)
    os._exit(0)


if __name__ == "__main__":
    main()
