/* A sandbox's own devpts, mounted at its /dev/pts when somebody first wants a terminal there: a superblock that most sandboxes never need.
 *
 * A short-lived helper enters the sandbox's user and mount namespaces, so that the file system belongs to the sandbox's user namespace
 * (its root there owns the terminals) and is an instance of its own (no other sandbox's terminals, nor the host's, are in it). It opens
 * one path there, /dev/pts, of the read-only /dev that the zygote mounted, and follows no link on the way.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/vfs.h>

#include "sys.h"
#include "zygote.h"

#define DEVPTS_MAGIC 0x1cd1
#define MOST_TERMINALS "256" /* of a sandbox: the kernel counts all of a host together, 4096 by default, 1024 of them for the host itself */
#define OPTIONS "newinstance,ptmxmode=0666,mode=0620,max=" MOST_TERMINALS
#define PATIENCE_S 20

static void __attribute__((noreturn)) give_up(int error) { _exit(error > 0 && error < 255 ? error : EIO); }

static void __attribute__((noreturn)) helper(int pidfd) {
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS};
    struct statfs there;
    alarm(PATIENCE_S);
    if (setns(pidfd, CLONE_NEWUSER | CLONE_NEWNS) < 0) give_up(errno);
    int place = (int)syscall(SYS_openat2, AT_FDCWD, "/dev/pts", &how, sizeof how);
    if (place < 0 || fstatfs(place, &there) < 0) give_up(errno);
    if (there.f_type == DEVPTS_MAGIC) _exit(0); /* an earlier helper's, whose end nobody noticed */
    /* By mount(2): fsmount() makes a mount namespace on the way, of which a sandbox may have none. Group 5 is who may write to terminals; an
     * id map without it has root's only. */
    if (fchdir(place) < 0) give_up(errno);
    if (mount("devpts", ".", "devpts", MS_NOSUID | MS_NOEXEC, OPTIONS ",gid=5") < 0 &&
        mount("devpts", ".", "devpts", MS_NOSUID | MS_NOEXEC, OPTIONS ",gid=0") < 0)
        give_up(errno);
    _exit(0);
}

pid_t terminal_mount(pid_t pid1) {
    int pidfd = (int)syscall(SYS_pidfd_open, pid1, 0); /* here, where its number can't have become another's */
    if (pidfd < 0) return -errno;
    pid_t pid = fork();
    int error = errno;
    if (pid == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        if (dup2(pidfd, FD_GUEST) < 0 || syscall(SYS_close_range, FD_GUEST + 1, ~0u, 0) < 0) give_up(errno);
        helper(FD_GUEST);
    }
    close(pidfd);
    return pid < 0 ? -error : pid;
}
