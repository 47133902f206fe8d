"""What a sandbox starts with: `python -I -S sandbox_launcher.py SPEC`. It needs nothing but the standard library.

In: a JSON object, which `sandbox.py` makes. Out: the program in its place, behind limits and in namespaces of its
own. One byte on `ready_fd` says that all of that was done; where a part cannot be done it ends, and nothing is run.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x1, 0x2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65534
_HOME = "/sandbox"
_DEVICES = ("null", "zero", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main(spec: dict[str, Any]) -> None:
    """Never returns."""
    program = Path(spec["program"]).read_text(encoding="utf-8", errors="replace")
    _enter(Path(spec["folder"]), spec)
    Path("main.py").write_text(program, encoding="utf-8")
    _limit(spec)
    # From here on it has no rights left, and gets none by running anything.
    if spec["is_root"]:
        os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    os.write(spec["ready_fd"], b"1")
    os.set_inheritable(spec["ready_fd"], False)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": _HOME, "TMPDIR": _HOME, "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(spec["python"], [spec["python"], "-I", "-B", "main.py"], environment)


def _enter(folder: Path, spec: dict[str, Any]) -> None:
    """Into new namespaces, and into the only folder there that can be written."""
    _unshare(spec)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={spec['disk_bytes']},mode=755")
    for place in spec["visible"]:
        _show(Path(place), folder)
    (folder / "dev").mkdir()
    for name in _DEVICES:
        (folder / "dev" / name).touch()
        _mount(f"/dev/{name}", folder / "dev" / name, None, _MS_BIND)
    (folder / "proc").mkdir()
    home = folder / _HOME.lstrip("/")
    home.mkdir()
    home.chmod(0o777)
    if (child := os.fork()) != 0:
        _stand_for(child)
    os.setsid()  # a signal to its own group is to reach nobody outside
    _mount("proc", folder / "proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chroot(folder)
    os.chdir(_HOME)


def _unshare(spec: dict[str, Any]) -> None:
    """Namespaces, in which the program is nobody.

    The kernel bounds the number of processes of everybody but root. So root's programs are nobody outside, too;
    only somebody who stays outside may say so.
    """
    user, group = os.geteuid(), os.getegid()
    users, groups = f"{_NOBODY} {user} 1", f"{_NOBODY} {group} 1"
    if spec["is_root"]:
        users = groups = f"0 0 1\n{_NOBODY} {_NOBODY} 1"
    inside, outside = os.pipe()
    launcher = os.getpid()
    if spec["is_root"] and os.fork() == 0:
        os.close(outside)
        os.read(inside, 1)
        Path(f"/proc/{launcher}/uid_map").write_text(users, encoding="ascii")
        Path(f"/proc/{launcher}/gid_map").write_text(groups, encoding="ascii")
        os._exit(0)
    kinds = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS
    _checked(_libc.unshare(kinds), "unshare")
    os.close(outside)  # which the helper has waited for
    if spec["is_root"]:
        os.wait()
    else:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(users, encoding="ascii")
        Path("/proc/self/gid_map").write_text(groups, encoding="ascii")
    if str(_NOBODY) not in Path("/proc/self/uid_map").read_text(encoding="ascii"):
        raise OSError("uid_map cannot be written")
    os.close(inside)


def _show(place: Path, folder: Path) -> None:
    """The same there, to be read only; links as links."""
    inside = folder / str(place).lstrip("/")
    inside.parent.mkdir(parents=True, exist_ok=True)
    if inside.exists() or inside.is_symlink():
        return  # below another that is there
    if place.is_symlink():
        inside.symlink_to(place.readlink())
        return
    if place.is_dir():
        inside.mkdir()
    else:
        inside.touch()
    _mount(place, inside, None, _MS_BIND | _MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    path = os.fsencode(inside)
    done = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked(done, f"mount_setattr {inside}")


def _stand_for(child: int) -> None:
    """Outside of the new process namespace: wait for its first process, and end as that does."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    os.closerange(3, 256)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _limit(spec: dict[str, Any]) -> None:
    for number, value in (
        (resource.RLIMIT_AS, spec["memory_bytes"]),
        (resource.RLIMIT_CPU, spec["cpu_s"]),
        (resource.RLIMIT_FSIZE, spec["disk_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, spec["num_tasks"]),
    ):
        hard = resource.getrlimit(number)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))


def _mount(source: object, target: object, kind: str | None, flags: int, words: str | None = None) -> None:
    arguments = [None if item is None else os.fsencode(str(item)) for item in (source, target, kind)]
    _checked(
        _libc.mount(*arguments, ctypes.c_ulong(flags), None if words is None else words.encode()), f"mount {target}"
    )


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
