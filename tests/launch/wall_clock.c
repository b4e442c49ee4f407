/* A wall clock that is set while a program runs: by WALL_CLOCK_JUMP seconds, WALL_CLOCK_AFTER seconds after the first look
   at it. Preloaded, it stands before the C library's; the monotonic clock stays what it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*real_gettime)(clockid_t, struct timespec *);

static time_t jump(void) {
    static time_t began;
    struct timespec now;
    if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_gettime(CLOCK_MONOTONIC, &now);
    if (!began) began = now.tv_sec;
    const char *by = getenv("WALL_CLOCK_JUMP"), *after = getenv("WALL_CLOCK_AFTER");
    return by && after && now.tv_sec - began >= atol(after) ? atol(by) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    time_t by = jump();
    int code = real_gettime(clock, found);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) found->tv_sec += by;
    return code;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
