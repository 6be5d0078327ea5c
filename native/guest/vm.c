/* The guest in a virtual machine, as its first program or as a service of one that has booted by itself (vm_serve).
 *
 * As the first program: what the zygote does for a container is done here, in two steps.
 *
 * First from the initramfs to a machine that waits: modules, devices, layers with the disk over them. A template is saved while it waits, and
 * every clone goes on from there, with a copy of its disk. Disks are known by their serials: m0, d0, m1, d1, ... (a layer's image and its
 * data, top first), and `disk`; a VMM that gives them none has `dsec.disks=disk,m0,d0,...` in the command line, in the order of their devices.
 * Then what makes a clone somebody: clock, random seed, names. That comes as CONFIGURE, the first frame on the port. After it the guest goes
 * on as in a container; the port is its channel. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"
#include "guest.h"
#include "vm.h"

#define WARM_BYTES (48u << 20)
#define NEW_ROOT "/n"
#define MOST_LAYERS 400

static int urandom = -1, machine_id = -1; /* opened before the template is saved: what a clone does first it does at the speed of cold code */

_Noreturn void vm_halt(void) {
    sync();
    reboot(RB_AUTOBOOT); /* the VMM was told that this is the end */
    for (;;) pause();
}

void vm_say_to(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, text, strlen(text)) < 0) { /* a kernel that doesn't have it */
    }
    close(fd);
}

_Noreturn void vm_give_up(const char *what, int error) {
    char line[256];
    snprintf(line, sizeof line, "<0>dsec: %s: %s\n", what, strerror(error));
    vm_say_to("/dev/kmsg", line);
    if (guest.service) _exit(71);
    vm_halt();
}

size_t vm_read_text(const char *path, char *text, size_t capacity) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t size = read(fd, text, capacity - 1);
    close(fd);
    if (size <= 0) return 0;
    if (text[size - 1] == '\n') size--;
    text[size] = 0;
    return (size_t)size;
}

/* --- boot ------------------------------------------------------------------------------------------------------------------------ */

static void must_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *options) {
    mkdir(target, 0755);
    if (mount(source, target, type, flags, options)) vm_give_up(target, errno);
}

static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }
static int visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

/* /modules holds them in the order in which they need each other. */
static void load_modules(void) {
    struct dirent **found;
    int count = scandir("/modules", &found, visible, by_name);
    for (int i = 0; i < count; i++) {
        char path[300];
        snprintf(path, sizeof path, "/modules/%s", found[i]->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST) vm_give_up(path, errno);
        close(fd);
        unlink(path);
        free(found[i]);
    }
    if (count >= 0) free(found);
}

/* The device whose `attribute` in `class` is `value`: "/dev/NAME" in `path`. */
bool vm_find_device(const char *class, const char *attribute, const char *value, char *path, size_t capacity) {
    char name[300], text[64];
    DIR *dir = opendir(class);
    bool found = false;
    for (struct dirent *entry; dir && !found && (entry = readdir(dir));) {
        snprintf(name, sizeof name, "%s/%.64s/%s", class, entry->d_name, attribute);
        found = vm_read_text(name, text, sizeof text) && strcmp(text, value) == 0;
        if (found) snprintf(path, capacity, "/dev/%.64s", entry->d_name);
    }
    if (dir) closedir(dir);
    return found;
}

/* What the kernel's command line says of `name`, which ends with '='. */
bool vm_command_line(const char *name, char *value, size_t capacity) {
    static char line[4096];
    if (!line[0] && !vm_read_text("/proc/cmdline", line, sizeof line)) return false;
    const char *at = strstr(line, name);
    if (!at) return false;
    at += strlen(name);
    snprintf(value, capacity, "%.*s", (int)strcspn(at, " "), at);
    return true;
}

bool vm_find_disk(const char *serial, char *path, size_t capacity) {
    char disks[2048], *rest = disks, *name;
    if (vm_find_device("/sys/block", "serial", serial, path, capacity)) return true;
    if (!vm_command_line("dsec.disks=", disks, sizeof disks)) return false;
    for (char letter = 'a'; letter <= 'z' && (name = strsep(&rest, ",")); letter++) {
        if (strcmp(name, serial) == 0) return snprintf(path, capacity, "/dev/vd%c", letter) > 0;
    }
    return false;
}

static void mount_layers(void) {
    for (int i = 0; i < MOST_LAYERS; i++) {
        char serial[16], image[80], data[80], target[16], options[100] = "";
        snprintf(serial, sizeof serial, "m%d", i);
        if (!vm_find_disk(serial, image, sizeof image)) break;
        snprintf(serial, sizeof serial, "d%d", i);
        if (vm_find_disk(serial, data, sizeof data)) snprintf(options, sizeof options, "device=%s", data);
        snprintf(target, sizeof target, "/l/%d", i);
        must_mount(image, target, "erofs", MS_RDONLY | MS_NOATIME, options);
    }
}

static void make_groups(void) {
    must_mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    vm_say_to("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids");
    mkdir(GROUPS_DIR, 0755);
}

static void loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
}

static void make_dev(void) {
    static const char *const LINKS[][2] = {
        {"/proc/self/fd", "/dev/fd"}, {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"}, {"/proc/self/fd/2", "/dev/stderr"},
    };
    for (size_t i = 0; i < sizeof LINKS / sizeof *LINKS; i++) {
        if (symlink(LINKS[i][0], LINKS[i][1])) { /* it is there already */
        }
    }
    must_mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666");
    must_mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
}

static void must(const char *what, int result) {
    if (result) vm_give_up(what, errno);
}

/* A mount point in the image: made where it is missing, refused where it is a link. */
static void mount_point(const char *path) {
    struct stat st;
    if (lstat(path, &st)) must(path, mkdir(path, 0755));
    else if (!S_ISDIR(st.st_mode)) vm_give_up(path, ENOTDIR);
}

static void mount_root(void) {
    static char options[8192];
    char device[80], path[16];
    size_t used = (size_t)snprintf(options, sizeof options, "volatile,upperdir=/disk/upper,workdir=/disk/work,lowerdir=");
    for (int i = 0; i < MOST_LAYERS; i++) {
        snprintf(path, sizeof path, "/l/%d", i);
        if (access(path, F_OK)) break;
        used += (size_t)snprintf(options + used, sizeof options - used, "%s%s", i ? ":" : "", path);
    }
    if (!vm_find_disk("disk", device, sizeof device)) vm_give_up("find the disk", ENODEV);
    mkdir("/disk", 0700);
    must("mount the disk", mount(device, "/disk", "ext4", MS_NOATIME, "noauto_da_alloc"));
    mkdir("/disk/upper", 0755);
    mkdir("/disk/work", 0700);
    mkdir(NEW_ROOT, 0755);
    must("mount the layers", mount("overlay", NEW_ROOT, "overlay", 0, options));
    static const char *const MOVED[] = {"/proc", "/sys", "/dev"};
    for (size_t i = 0; i < sizeof MOVED / sizeof *MOVED; i++) {
        snprintf(path, sizeof path, NEW_ROOT "%s", MOVED[i]);
        mount_point(path);
        must(path, mount(MOVED[i], path, NULL, MS_MOVE, NULL));
    }
    must("enter the new root", chdir(NEW_ROOT));
    must("move the new root", mount(".", "/", NULL, MS_MOVE, NULL));
    must("change the root", chroot("."));
    must("go to the root", chdir("/"));
}

/* --- the first frames -------------------------------------------------------------------------------------------------------------- */

static uint64_t asked; /* the op of the frame that is answered */

static void put_ns(uint8_t type, uint64_t ns) {
    uint8_t payload[8];
    put_u64(payload, ns);
    port_put(type, asked, payload, sizeof payload);
}

static _Noreturn void refuse(const char *what, int error) {
    uint8_t payload[8 + 256];
    char why[256];
    snprintf(why, sizeof why, "%s: %s", what, strerror(error));
    put_u32(payload, (uint32_t)error);
    put_u32(payload + 4, 0);
    memcpy(payload + 8, why, strlen(why));
    port_put(DSEC_REFUSED, asked, payload, 8 + strlen(why));
    for (;;) port_wait(); /* whoever made the machine ends it */
}

/* --- a clone becomes somebody ------------------------------------------------------------------------------------------------------ */

struct configuration {
    char hostname[65], machine_id[33];
    uint8_t token[DSEC_TOKEN_SIZE], seed[64];
    uint32_t seed_size;
    bool has_token;
    uint64_t clock_ns, pids, flags;
};

/* `again`: its random state and machine id may be its own already. */
static int parse(struct configuration *found, const uint8_t *data, size_t size, bool again) {
    struct dsec_fields list = {data, data + size};
    struct dsec_field field;
    int more, error = 0;
    while (!error && (more = dsec_next_field(&list, &field)) != 0) {
        if (more < 0) return more;
        switch (field.tag) {
        case TAG_TOKEN:
            if (field.length != DSEC_TOKEN_SIZE) return -EPROTO;
            memcpy(found->token, field.data, DSEC_TOKEN_SIZE);
            found->has_token = true;
            break;
        case TAG_SEED:
            if (field.length > sizeof found->seed) return -EPROTO;
            memcpy(found->seed, field.data, field.length);
            found->seed_size = field.length;
            break;
        case TAG_HOSTNAME: error = dsec_field_text(&field, found->hostname, sizeof found->hostname); break;
        case TAG_MACHINE_ID: error = dsec_field_text(&field, found->machine_id, sizeof found->machine_id); break;
        case TAG_CLOCK_NS: error = dsec_field_u64(&field, &found->clock_ns); break;
        case TAG_PIDS: error = dsec_field_u64(&field, &found->pids); break;
        case TAG_SPAWN_FLAGS: error = dsec_field_u64(&field, &found->flags); break;
        default: return -EPROTO;
        }
    }
    return error ? error : found->has_token && (found->seed_size || again) && found->clock_ns ? 0 : -EPROTO;
}

/* What a device of random numbers has given before, and the kernel keeps for who asks next: all clones have the same. */
static void drain_device(void) {
    char old[256];
    int fd = open("/dev/hwrng", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    while (fd >= 0 && read(fd, old, sizeof old) < 0 && errno == EINTR) {
    }
    if (fd >= 0) close(fd);
}

static int renew_random(const struct configuration *is) {
    union {
        struct rand_pool_info info;
        uint8_t space[sizeof(struct rand_pool_info) + sizeof is->seed];
    } pool;
    pool.info.entropy_count = (int)is->seed_size * 8;
    pool.info.buf_size = (int)is->seed_size;
    memcpy(pool.info.buf, is->seed, is->seed_size);
    int error = ioctl(urandom, RNDADDENTROPY, &pool) || ioctl(urandom, RNDRESEEDCRNG) ? -errno : 0;
    drop(&urandom);
    drain_device();
    return error;
}

/* Written over what is there: a file that was cut first and is closed then has its blocks freed and found anew, and is written to the disk at
 * once (ext4). Where that can't be it is empty: nobody has another's. */
static int set_machine_id(const char *id) {
    char line[40];
    struct stat st;
    int size = snprintf(line, sizeof line, "%s\n", id);
    if (fstat(machine_id, &st)) return -errno;
    if (pwrite(machine_id, line, (size_t)size, 0) != size) size = 0;
    return st.st_size > size && ftruncate(machine_id, size) ? -errno : 0;
}

/* 0, or a negative errno at `what`. */
static int become(const struct configuration *is, const char **what) {
    struct timespec now = {(time_t)(is->clock_ns / NANOSECONDS), (long)(is->clock_ns % NANOSECONDS)};
    *what = "set the clock";
    if (clock_settime(CLOCK_REALTIME, &now)) return -errno;
    *what = "renew the random state";
    int error = is->seed_size ? renew_random(is) : 0;
    if (error) return error;
    *what = "set the host name";
    if (sethostname(is->hostname, strlen(is->hostname))) return -errno;
    *what = "set the machine id";
    error = machine_id >= 0 ? set_machine_id(is->machine_id) : 0; /* an image that has none gets none */
    if (error) return error;
    drop(&machine_id);
    channel_token(is->token);
    return 0;
}

static void configure(const uint8_t *payload, size_t size) {
    static struct configuration is;
    const char *what = "CONFIGURE has a field that is missing or wrong";
    uint64_t begin = now_ns();
    int error = parse(&is, payload, size, false);
    if (!error) error = become(&is, &what);
    if (error) refuse(what, -error);
    vm_limit(is.pids, is.flags & SF_NO_NEW_PRIVS);
    memset(&is, 0, sizeof is);
    put_ns(DSEC_CONFIGURED, now_ns() - begin);
}

int vm_become(const uint8_t *payload, size_t size, uint8_t took[8], const char **what) {
    struct configuration is = {0};
    uint64_t begin = now_ns();
    struct stat st;
    *what = "CONFIGURE has a field that is missing or wrong";
    int error = parse(&is, payload, size, true);
    if (error) return error;
    if (is.seed_size) { /* whatever root inside has made of these */
        urandom = open("/dev/urandom", O_RDWR | O_NONBLOCK | O_CLOEXEC);
        machine_id = open("/etc/machine-id", O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    }
    if (machine_id >= 0 && (fstat(machine_id, &st) || !S_ISREG(st.st_mode))) drop(&machine_id);
    error = become(&is, what);
    drop(&urandom);
    drop(&machine_id);
    vm_limit_programs(is.pids, is.flags & SF_NO_NEW_PRIVS);
    put_u64(took, now_ns() - begin);
    return error;
}

int vm_write_down(void) {
    kill(-1, SIGSTOP);
    vm_halt();
}

/* Reads a file, so that every clone finds it in memory, which it then shares with the others. */
static void warm(const char *path, size_t *left) {
    static char buffer[65536];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        for (ssize_t got; *left && (got = read(fd, buffer, sizeof buffer)) > 0;) *left -= MIN((size_t)got, *left);
    }
    close(fd);
}

static void warm_all(const uint8_t *data, size_t size, size_t *left) {
    struct dsec_fields list = {data, data + size};
    struct dsec_field field;
    char path[4096];
    while (dsec_next_field(&list, &field) > 0) {
        if (field.tag == TAG_PATH && dsec_field_text(&field, path, sizeof path) == 0) warm(path, left);
    }
}

static void first_frames(void) {
    static uint8_t payload[DSEC_MAX_PAYLOAD];
    uint8_t head[DSEC_HEADER_SIZE];
    struct dsec_header header;
    size_t left = WARM_BYTES;
    do {
        put_ns(DSEC_READY, now_ns());
        port_take(head, sizeof head);
        if (dsec_get_header(head, &header)) refuse("CONFIGURE was expected", EPROTO);
        asked = header.op;
        port_take(payload, header.size);
        if (header.type == DSEC_WARM) warm_all(payload, header.size, &left);
        else if (header.type != DSEC_CONFIGURE) refuse("CONFIGURE was expected", EPROTO);
    } while (header.type != DSEC_CONFIGURE);
    configure(payload, header.size);
}

/* From the first frames to a guest as in a container: the port becomes its channel, its groups are where it expects them. */
static void become_somebody(void) {
    port_begin();
    first_frames();
    int groups = open(GROUPS_DIR, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int at = port_end(DSEC_FD_CGROUP + 1); /* out of the way of the numbers that they get */
    if (groups >= 0) groups = fcntl(groups, F_DUPFD_CLOEXEC, DSEC_FD_CGROUP + 1);
    dup3(at, DSEC_FD_CHANNEL, O_CLOEXEC);
    if (groups >= 0) dup3(groups, DSEC_FD_CGROUP, O_CLOEXEC);
    else close(DSEC_FD_CGROUP);
}

static void boot(void) {
    must_mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    must_mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    must_mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
    load_modules();
    port_open();
    mkdir("/l", 0755);
    mount_layers();
    make_groups();
    loopback_up();
    make_dev();
    vm_say_to("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    mount_root();
}

void vm_boot(bool again) {
    guest.machine = true;
    if (again) {
        prctl(PR_SET_NAME, "init", 0, 0, 0); /* execve named it after its path */
        port_again();
    } else {
        boot();
    }
    machine_id = open("/etc/machine-id", O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    urandom = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (!again) sync();
    become_somebody();
}

int vm_again(void) {
    static char *const INIT[] = {"init", "--again", NULL}, *const SERVICE[] = {"dsec-guest", "--service", "again", NULL};
    if (!guest.machine || !port_stays()) return -EPROTO;
    if (guest.service) ops_kill_all();
    else kill(-1, SIGKILL);
    groups_trim(true);
    fcntl(DSEC_FD_CHANNEL, F_SETFD, 0);
    execv("/proc/self/exe", guest.service ? SERVICE : INIT);
    vm_give_up("begin again", errno);
}

/* The service of a full machine, which has booted by itself: all that is missing is the port, the groups, and who it is. */
void vm_serve(bool again) {
    guest.machine = true;
    guest.service = true;
    if (again) port_again();
    else port_open();
    vm_say_to("/proc/sys/kernel/panic", "-1"); /* restart, which the VMM sees: a kernel that stands still tells nobody */
    vm_say_to("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids");
    mkdir(GROUPS_DIR, 0755);
    machine_id = open("/etc/machine-id", O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    urandom = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (!again) sync();
    become_somebody();
}
