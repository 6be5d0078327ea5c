/* A SPAWN request, checked: what the edge may ask for. The edge is trusted; the checks keep its mistakes from opening the host. */
#include <errno.h>
#include <string.h>

#include "fields.h"
#include "zygote.h"

static const char *keep_path(struct plan *plan, const struct dsec_field *field) {
    char *text = plan->arena + plan->arena_used;
    if (dsec_field_text(field, text, sizeof plan->arena - plan->arena_used) < 0 || *text != '/') return NULL;
    plan->arena_used += field->length + 1;
    return text;
}

static bool only(const char *text, const char *extra) {
    for (; *text; text++)
        if (!((*text >= 'a' && *text <= 'z') || (*text >= '0' && *text <= '9') || strchr(extra, *text))) return false;
    return true;
}

static int take(struct plan *plan, const struct dsec_field *field) {
    uint64_t number = 0;
    const char *path = NULL;
    switch (field->tag) {
    case TAG_LOWER: case TAG_UPPER: case TAG_WORK: case TAG_CGROUP2: case TAG_CGROUP: case TAG_DEV: case TAG_VIEW:
        if (!(path = keep_path(plan, field))) return -EINVAL;
        break;
    case TAG_ID_BASE: case TAG_ID_COUNT: case TAG_CPUS: case TAG_OOM_SCORE_ADJ: case TAG_SPAWN_FLAGS: case TAG_MEMORY:
        if (dsec_field_u64(field, &number) < 0) return -EPROTO;
        break;
    }
    switch (field->tag) {
    case TAG_SANDBOX:
        return dsec_field_text(field, plan->sandbox, sizeof plan->sandbox) < 0 || !only(plan->sandbox, "") ? -EINVAL : 0;
    case TAG_HOSTNAME:
        return dsec_field_text(field, plan->hostname, sizeof plan->hostname) < 0 || !only(plan->hostname, "-.") ? -EINVAL : 0;
    case TAG_LOWER:
        if (plan->lowers == MAX_LOWERS) return -E2BIG;
        plan->lower[plan->lowers++] = path;
        return 0;
    case TAG_CGROUP:
        if (plan->cgroups == MAX_CGROUPS) return -E2BIG;
        plan->cgroup[plan->cgroups++] = path;
        return 0;
    case TAG_UPPER: plan->upper = path; return 0;
    case TAG_WORK: plan->work = path; return 0;
    case TAG_CGROUP2: plan->cgroup2 = path; return 0;
    case TAG_DEV: plan->dev = path; return 0;
    case TAG_VIEW: plan->view = path; return 0;
    case TAG_ID_BASE: plan->id_base = number; return 0;
    case TAG_ID_COUNT: plan->id_count = number; return 0;
    case TAG_CPUS:
        if (number >= MAX_CPUS) return -EINVAL;
        plan->cpus[number / (8 * sizeof(long))] |= 1ul << number % (8 * sizeof(long));
        plan->has_cpus = true;
        return 0;
    case TAG_OOM_SCORE_ADJ:
        if (number > 1000) return -EINVAL;
        plan->oom_score_adj = number;
        return 0;
    case TAG_SPAWN_FLAGS:
        plan->flags = number;
        return number & ~(uint64_t)(SF_NO_NEW_PRIVS | SF_NETWORK | SF_CELLS) ? -EINVAL : 0;
    case TAG_MEMORY: return 0;
    default: return -EPROTO;
    }
}

int plan_read(struct plan *plan, const uint8_t *data, size_t size, const char **why) {
    memset(plan, 0, offsetof(struct plan, arena));
    struct dsec_fields fields = {data, data + size};
    struct dsec_field field;
    int more, error;
    while ((more = dsec_next_field(&fields, &field)) > 0)
        if ((error = take(plan, &field))) {
            *why = error == -EPROTO ? "unknown or malformed field" : "a field's value is not acceptable (a relative path, a bad name, a number out of range)";
            return error;
        }
    if (more < 0) {
        *why = "the list of fields is cut";
        return more;
    }
    if (!*plan->sandbox || !plan->lowers || !plan->upper || !plan->work || !plan->cgroup2 || !plan->dev) {
        *why = "SANDBOX, LOWER, UPPER, WORK, CGROUP2 and DEV are all needed";
        return -EINVAL;
    }
    if (!*plan->hostname) memcpy(plan->hostname, plan->sandbox, sizeof plan->sandbox);
    if (plan->id_base < MIN_ID_BASE || !plan->id_count || plan->id_count > UINT32_MAX - plan->id_base) {
        *why = "the id range must begin at 65536 or above, so that no id inside is one of the host's own";
        return -EINVAL;
    }
    return 0;
}

const char *stage_text(uint32_t stage) {
    static const char *const TEXT[STAGES] = {
        [AT_REQUEST] = "request",
        [AT_CGROUP2] = "opening and delegating the cgroup v2 directory: is it there?",
        [AT_OVERLAY] = "mounting the overlay: are all layers mounted, is the upper directory on a file system that can be one, is the work "
                       "directory fresh?",
        [AT_DEV] = "cloning the shared /dev",
        [AT_VIEW] = "cloning the directory of generated files",
        [AT_NETWORK] = "making or entering a net namespace (with a network: does the kernel have nftables with tproxy and socket?)",
        [AT_SOCKETS] = "making sockets: is the host out of descriptors?",
        [AT_CLONE] = "clone3: is the host out of processes, memory or namespaces (user.max_*_namespaces)?",
        [AT_ID_MAP] = "writing the id maps",
        [AT_OOM_SCORE] = "setting the OOM score",
        [AT_CGROUP] = "attaching to a v1 cgroup: is it there?",
        [AT_FILES] = "copying the descriptors",
        [AT_RELEASE] = "waiting for the zygote",
        [AT_CREDENTIALS] = "becoming root inside",
        [AT_ROOT] = "attaching the root: do proc, dev and sys exist in the image as directories, does the upper directory belong to root "
                    "inside?",
        [AT_PROC] = "mounting /proc",
        [AT_MASK] = "masking /proc",
        [AT_MOUNT_PTS] = "mounting devpts at /dev/pts",
        [AT_MOUNT_DEV] = "binding /dev: is it a directory in the image?",
        [AT_MOUNT_VIEW] = "binding generated files: is their directory readable for all?",
        [AT_PIVOT] = "changing the root",
        [AT_CGROUP_NS] = "making the cgroup namespace",
        [AT_SYSCTL] = "forbidding nested namespaces",
        [AT_HOSTNAME] = "setting the host name",
        [AT_RLIMITS] = "setting resource limits",
        [AT_AFFINITY] = "setting the CPU affinity: are these CPUs online and in our cpuset?",
        [AT_CAPABILITIES] = "dropping capabilities",
        [AT_LANDLOCK] = "entering the landlock domain",
        [AT_SOURCE] = "starting the source of workers",
        [AT_EXEC] = "executing the guest",
    };
    return stage < STAGES && TEXT[stage] ? TEXT[stage] : "unknown stage";
}
