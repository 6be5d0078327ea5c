/* A process's wall clock is off by WRONG_CLOCK_S seconds (LD_PRELOAD); its other clocks are as they are. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t off(void) {
    const char *said = getenv("WRONG_CLOCK_S");
    return said ? atol(said) : 0;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int result = (int)syscall(SYS_clock_gettime, id, at);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += off();
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    int result = (int)syscall(SYS_gettimeofday, at, zone);
    if (!result && at) at->tv_sec += off();
    return result;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
