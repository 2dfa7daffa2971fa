"""The process inside the sandbox: it sets limits, then runs an untrusted program.

The sandbox starts the process by the path of this file, without importing the project: `python -I
-S inside.py TOKEN_FD VERDICT_FD BYTES SECONDS`, with the program on stdin. If the program runs to
its end, `inside.py` copies a random word from TOKEN_FD to VERDICT_FD. If the program raises an
exception, `inside.py` writes the name of the exception to VERDICT_FD.
"""

import ctypes
import os
import resource
import sys

FILE_BYTES = 1 << 24
OPEN_FILES = 64
NOBODY = 65534
# options of prctl, defined in <linux/prctl.h>, and numbers from <linux/capability.h>
DUMPABLE = 4
DROP_BOUND = 24
NO_NEW_PRIVILEGES = 38
AMBIENT = 47
CLEAR_ALL = 4  # with prctl's option AMBIENT: remove all ambient capabilities
CAPABILITY_VERSION = 0x20080522
CAPABILITIES = 64


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process permanently: it has at most `memory_bytes` of memory and `cpu_s` seconds
    of processor time, and can start no child processes. The process cannot raise a limit again."""
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
    # the system's limit on processes does not apply to root, so root becomes the user `nobody`
    if os.geteuid() == 0:
        keep_library()
        # the call does nothing, and returns EINVAL, for capabilities that the kernel does not have
        for capability in range(CAPABILITIES):
            libc.prctl(DROP_BOUND, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # without this call /proc/self would belong to root, and the process could not import
        # Python's library through /proc/self/fd (see `keep_library`)
        libc.prctl(DUMPABLE, 1, 0, 0, 0)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)(0, 0, 0, 0, 0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def keep_library() -> None:
    """Open the directories of `sys.path`, so that even the user `nobody` can import modules from
    them. The library of the interpreter may be inside a directory that the user `nobody` may not
    enter, such as root's home."""
    opened = {}
    for path in sys.path:
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # an entry of sys.path, such as python311.zip, need not exist
            continue
        opened[path] = f"/proc/self/fd/{directory}"
    sys.path[:] = opened.values()
    sys.path_importer_cache.clear()
    # packages that are already imported, such as encodings, must also search for their modules in
    # the opened directories
    for module in list(sys.modules.values()):
        for number, folder in enumerate(getattr(module, "__path__", ())):
            parent, name = os.path.split(folder)
            if parent in opened:
                module.__path__[number] = f"{opened[parent]}/{name}"


def main() -> None:
    """Run the program that stdin contains, within the limits that the command line gives."""
    token, verdict, memory_bytes, cpu_s = map(int, sys.argv[1:5])
    program = sys.stdin.buffer.read()
    # replace the standard input, so that the program cannot read anything from it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
