/* The fork of a command or a file call. The child shares nothing but descriptors with the guest from here on, so it may block: on a
 * user database, a working directory, an executable on a slow file system. It tells where it failed through the report pipe. */
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"
#include "libc.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define DEFAULT_TERM "xterm-256color"
#define OOM_PREFERENCE 100 /* of a command over its guest, in thousandths */

struct ends { /* the child's ends of the pipes */
    int input, output, error, report, cgroup; /* cgroup: still to be entered; -1 */
};

void child_fail(int report, enum dsec_stage stage, int error) {
    uint8_t message[8];
    put_u32(message, stage);
    put_u32(message + 4, (uint32_t)error);
    while (write(report, message, sizeof message) < 0 && errno == EINTR) {}
    _exit(127);
}

/* --- in the child ------------------------------------------------------------------------------------------------------------------ */

static void prefer_for_oom(void) {
    char digits[8], *end = digits + sizeof digits;
    if (guest.oom_score_adj < 0) return;
    const char *text = format_u64(end, (uint64_t)MIN(guest.oom_score_adj + OOM_PREFERENCE, 1000));
    int fd = openat(AT_FDCWD, "/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, text, (size_t)(end - text)) < 0) { /* no more than a preference */
    }
    close(fd);
}

static void limit_files(const struct request *request) {
    struct rlimit limit = guest.nofile;
    if (SEEN(request, TAG_NOFILE)) {
        limit.rlim_cur = limit.rlim_max = request->nofile;
        if (setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
        limit.rlim_max = guest.nofile.rlim_max; /* above what the sandbox has: as much as there is */
        limit.rlim_cur = MIN(request->nofile, limit.rlim_max);
    }
    setrlimit(RLIMIT_NOFILE, &limit);
}

static const char *env_value(char *const *env, const char *name) {
    size_t size = strlen(name);
    for (; *env; env++) {
        if (strncmp(*env, name, size) == 0 && (*env)[size] == '=') return *env + size + 1;
    }
    return NULL;
}

static void env_default(struct request *request, const char *name, const char *value) {
    if (env_value(request->env, name)) return;
    size_t name_size = strlen(name), value_size = strlen(value);
    char *text = malloc(name_size + value_size + 2);
    if (!text) return;
    memcpy(text, name, name_size);
    text[name_size] = '=';
    memcpy(text + name_size + 1, value, value_size + 1);
    request->env[request->envc++] = text;
}

/* As execvp, but a script without an interpreter line is an error and not a shell's business. Returns the errno. */
static int execute(char *const *argv, char *const *env) {
    const char *name = argv[0];
    size_t name_size = strlen(name);
    int error = ENOENT;
    if (strchr(name, '/')) {
        execve(name, argv, env);
        return errno;
    }
    const char *path = env_value(env, "PATH");
    if (name_size > 255) return ENAMETOOLONG;
    for (const char *end; path; path = *end ? end + 1 : NULL) {
        char file[4096 + 257];
        end = strchrnul(path, ':');
        size_t size = (size_t)(end - path);
        if (size >= 4096) continue;
        memcpy(file, path, size);
        if (size) file[size++] = '/'; /* an empty part is the working directory */
        memcpy(file + size, name, name_size + 1);
        execve(file, argv, env);
        switch (errno) {
        case ENOENT: case ENOTDIR: case ESTALE: case ENODEV: case ETIMEDOUT: break;
        case EACCES: error = EACCES; break; /* said only if no other directory has it */
        default: return errno;
        }
    }
    return error;
}

#define REPORT 3

/* Streams to 0..2, the report to 3, and everything else of the guest's closed at once: a copy of another operation's stdin would keep
 * that one from its end for as long as this child blocks. */
static void take_descriptors(const struct ends *ends) {
    dup2(ends->input, 0); /* all four are above 3, where the control socket is */
    dup2(ends->output, 1);
    dup2(ends->error, 2);
    dup3(ends->report, REPORT, O_CLOEXEC);
    x_close_from(REPORT + 1);
}

/* So that opening /dev/stdout works for users other than root: a pipe belongs to whoever made it. */
static void own_streams(uint64_t flags, const struct identity *identity) {
    bool pipe = flags & EF_STDIN;
    for (int fd = pipe ? 0 : 1; fd < 3; fd++) {
        if (fchown(fd, identity->uid, identity->gid)) {
        }
    }
}

static _Noreturn void child(struct request *request, uint64_t flags, const struct ends *ends) {
    static struct identity identity;
    sigset_t none;
    if (ends->cgroup >= 0) {
        int procs = openat(ends->cgroup, "cgroup.procs", O_WRONLY | O_CLOEXEC);
        if (procs < 0 || write(procs, "0", 1) != 1) child_fail(ends->report, STAGE_CGROUP, errno);
    }
    take_descriptors(ends);
    prefer_for_oom();
    setsid();
    int error = user_resolve(request->user, &identity);
    if (error) child_fail(REPORT, STAGE_USER, -error);
    if (flags & EF_PTY) {
        error = terminal_take(identity.uid);
        if (error) child_fail(REPORT, STAGE_TERMINAL, -error);
    } else if (identity.uid != 0) {
        own_streams(flags, &identity);
    }
    limit_files(request);
    error = user_become(&identity);
    if (error) child_fail(REPORT, STAGE_USER, -error);
    if (request->kind != DSEC_EXEC) {
        prctl(PR_SET_DUMPABLE, 0); /* again: a change of user may have set it to a system-wide default */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        file_call(request, REPORT);
    }
    if (request->cwd && chdir(request->cwd)) child_fail(REPORT, STAGE_CWD, errno);
    env_default(request, "HOME", identity.home);
    env_default(request, "USER", identity.name);
    env_default(request, "LOGNAME", identity.name);
    env_default(request, "PATH", DEFAULT_PATH);
    if (flags & EF_PTY) env_default(request, "TERM", DEFAULT_TERM);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    child_fail(REPORT, STAGE_EXEC, execute(request->argv, request->env));
}

/* --- in the guest ------------------------------------------------------------------------------------------------------------------ */

static bool into_cgroup = true; /* clone3 can do it; where it can't, the child moves itself */

static pid_t fork_into(int cgroup) {
    struct clone_args args = {.exit_signal = SIGCHLD};
    if (cgroup >= 0) {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)cgroup;
    }
    long pid = syscall(SYS_clone3, &args, sizeof args);
    return pid < 0 ? (pid_t)-errno : (pid_t)pid;
}

static int make_pipe(int *ours, int *theirs, bool they_read) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return -errno;
    *ours = ends[they_read];
    *theirs = ends[!they_read];
    return fcntl(*ours, F_SETFL, O_NONBLOCK | (they_read ? O_WRONLY : O_RDONLY)) ? -errno : 0;
}

static void close_open(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static int make_streams(struct op *op, const struct request *request, struct ends *ends, enum dsec_stage *stage) {
    if (op->flags & EF_PTY) {
        int error = make_pipe(&op->report, &ends->report, false);
        if (error) return error;
        *stage = STAGE_TERMINAL;
        error = terminal_make(op, request->pty_size, &ends->input);
        ends->output = ends->error = ends->input;
        if (!error) *stage = STAGE_FORK;
        return error;
    }
    int error = make_pipe(&op->out.fd, &ends->output, false);
    if (!error && op->flags & EF_MERGE) ends->error = ends->output;
    if (!error && !(op->flags & EF_MERGE)) error = make_pipe(&op->err.fd, &ends->error, false);
    if (!error) error = make_pipe(&op->report, &ends->report, false);
    if (error) return error;
    if (op->flags & EF_STDIN) return make_pipe(&op->input, &ends->input, true);
    ends->input = guest.null;
    if (guest.null >= 0) return 0;
    error = make_pipe(&op->input, &ends->input, true); /* without /dev/null: a pipe that is at its end */
    close_open(&op->input);
    return error;
}

int spawn(struct op *op, struct request *request, enum dsec_stage *stage) {
    struct ends ends = {-1, -1, -1, -1, -1};
    int cgroup = -1, error = 0;
    pid_t pid = 0;
    *stage = STAGE_CGROUP;
    if (guest.cgroup >= 0 && op->kind == DSEC_EXEC) {
        error = group_take(op->id, &op->group);
        if (!error) cgroup = group_directory(op->group);
    }
    if (!error) {
        *stage = STAGE_FORK;
        error = make_streams(op, request, &ends, stage);
    }
    if (!error) {
        pid = fork_into(into_cgroup ? cgroup : -1);
        if (pid < 0 && into_cgroup && cgroup >= 0 && pid != -EAGAIN && pid != -ENOMEM) {
            into_cgroup = false;
            pid = fork_into(-1);
        }
        if (pid < 0) error = pid;
    }
    if (pid == 0 && !error) {
        if (!into_cgroup) ends.cgroup = cgroup;
        child(request, op->flags, &ends);
    }
    if (ends.error == ends.output) ends.error = -1;
    if (ends.output == ends.input) ends.output = -1;
    if (ends.input != guest.null) close_open(&ends.input);
    close_open(&ends.output);
    close_open(&ends.error);
    close_open(&ends.report);
    if (op->group) group_entered(op->group);
    if (error) {
        close_open(&op->out.fd);
        close_open(&op->err.fd);
        close_open(&op->report);
        close_open(&op->input);
        return error;
    }
    op->pid = pid;
    return 0;
}
