"""The launcher: the process that starts virtual machine monitors (VMMs), and outlives the server.

Run as a program by the path of this package, without the rest of dsec: `launcher SOCKET [--sockets] PROGRAM
[DIRECTORY...]`. It listens on SOCKET (SOCK_SEQPACKET; the last connection is the one that counts), goes to the
background when it does, and ends by `shutdown`, or where nobody ever connects. Messages are JSON objects, descriptors
travel beside them.

    hello                        -> {"pid", "epoch", "version", "live": {id: pid}, "ended": {id: end}, "held": [key...]}
    spawn id argv uid cgroups fds nofile fsize  + descriptors -> {"pid"} or {"error"}
        The first `cgroups` descriptors are cgroup.procs files to enter, the others become 3, 4, ... of the VMM.
        With `library` it loads the last descriptor (native/stem/stem.c); with `stem`, too, it becomes one.
    branch id stem uid cgroups files sockets + descriptors -> the same, of a copy of the stem of that id
        `files`: device and inode of each of the stem's that is replaced; `sockets`: how many. The descriptors are
        stem.c's, without its output. With `also` it is a stem, too.
    forget id                              -> {}            its end was heard
    hold key + descriptors, take key, drop key   what must outlive the server: the memory and state of templates
    shutdown                               -> {}            all VMMs are killed
    and unasked: {"exited": id, "status": wait status, "said": its last words}

A VMM lives in a jail (`jail.py`), behind one seccomp filter (`seccomp.py`) that is loaded here, before anything is
started, and inherited by all. It dies with the launcher. `--sockets`: VMMs may make unix sockets, and serve page faults
of their own (`userfaultfd`).

This module is what server and launcher share.
"""

VERSION = 4
UID_BASE = 1 << 30
"""VMMs run as users of their own from here on, far from those of containers."""
UIDS = 1 << 20
MAX_MESSAGE = 128 << 10
MAX_FDS = 250
